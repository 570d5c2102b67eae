"""What every scripts/run_MODEL.py shares: a script is a `Recipe`, and `main` makes a command of it."""

from launcher.app import main
from launcher.recipe import BLACKWELL, GRACE, HOPPER, Layout, Model, Recipe

__all__ = ["BLACKWELL", "GRACE", "HOPPER", "Layout", "Model", "Recipe", "main"]
