"""Communication between ranks: environment, rendezvous, failure detector, and collectives that record their traffic."""

import logging

# hides the advice that DeepSpeed logs when it finds no GPU; environment.py refuses machines with unusable GPUs
logging.getLogger("DeepSpeed").addFilter(lambda record: record.filename != "real_accelerator.py")
