"""Run the `neuclip-ds` program as `python -m neuclip_ds`."""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main()
