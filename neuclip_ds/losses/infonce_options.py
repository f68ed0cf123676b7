"""Published settings of OpenCLIP's loss; the equation is in infonce.py."""

from neuclip_ds.losses.method import Method, initial_temperature

METHODS = {"openclip": Method(builder="infonce.openclip", defaults=initial_temperature(0.07))}
