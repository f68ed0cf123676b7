"""`python -m neuclip_ds`, the same as `neuclip-ds`."""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main()
