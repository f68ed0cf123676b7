"""Colours of pages and of the figures in them, which refer to them by name."""

COLOURS = {  # name -> in the light and in the dark theme
    "curve-0": ("#2462c8", "#6fa8ff"),
    "curve-1": ("#d4510f", "#ff9357"),
    "curve-2": ("#14855a", "#46c993"),
    "curve-3": ("#9c36b5", "#d990ea"),
    "curve-4": ("#a87900", "#e8c441"),
    "curve-5": ("#0c8599", "#4fcbe0"),
    "curve-6": ("#c2255c", "#ff86ae"),
    "curve-7": ("#5c636e", "#b3bcc8"),
    "ink": ("#24292f", "#dfe4ea"),
    "grid": ("#dcdfe4", "#39404a"),
}
