"""What every trainer does, whatever library its model is built with: against the protocols of `protocol.py`."""
