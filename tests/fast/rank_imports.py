"""What the ranks of `run_ranks` import, most of it; imported once, before they are forked. It starts no thread."""

import miles.backends.megatron_utils.actor
import miles.tools.make_tiny_checkpoint  # noqa: F401
