"""`train.py --one-step-ahead`, or with `--fully-async`: the name under which people know training beside generation."""

import sys

from train import main

if __name__ == "__main__":
    sys.argv[1:1] = [] if any("fully" in word for word in sys.argv) else ["--one-step-ahead"]
    main()
