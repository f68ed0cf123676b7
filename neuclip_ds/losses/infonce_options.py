"""Published settings of OpenCLIP's loss; infonce.py has its equation."""

from neuclip_ds.losses.method import Method, initial_temperature

METHODS = {"openclip": Method(builder="infonce.openclip", defaults=initial_temperature(0.07))}
