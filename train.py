"""`neuclip-ds train` as a script, for launchers such as deepspeed.

Example: deepspeed --num_gpus 8 train.py cc12m_neuclip --data.train=manifests/cc12m
"""

from neuclip_ds.cli.main import main

if __name__ == "__main__":
    main(command="train")
