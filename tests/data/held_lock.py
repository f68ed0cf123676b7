"""A lock that child processes must not inherit while it is held; children import this module without torch."""

import threading

LOCK = threading.Lock()


def lock_is_free() -> bool:
    return LOCK.acquire(blocking=False)
