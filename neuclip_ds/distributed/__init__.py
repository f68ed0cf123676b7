"""Communication between ranks: environment, rendezvous, failure detector, and collectives that record their traffic."""
