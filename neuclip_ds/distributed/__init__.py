"""Communication between ranks: launch environment, rendezvous, failure detector and counted collectives."""
