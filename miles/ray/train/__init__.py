"""The trainer's side of the driver: a group of ranks that act as one."""
