"""`train.py --check`: what a run will need of devices and hosts, phase by phase, before anything starts."""
