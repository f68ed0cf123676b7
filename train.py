"""Entry point: `python train.py RECIPE`, or under `deepspeed`; see --help."""

from neuclip_ds.cli import main

if __name__ == "__main__":
    main()
