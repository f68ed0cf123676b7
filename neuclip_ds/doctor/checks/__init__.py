"""The checks, one a file; each has a function of a `Request` and a `Communicator` that yields findings."""
