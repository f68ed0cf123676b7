"""Serve the page of a run while it trains, or of several in comparison, to a browser.

It is the page that the run writes as report.html at its end, with the end of log.txt. It follows the run's files, on
any machine that sees them, and takes nothing from the run.

Example:
  neuclip-ds watch runs/dfn14m_neuclip
  neuclip-ds watch runs/dfn14m_neuclip runs/dfn14m_openclip --port 6010
"""

import os
from collections.abc import Sequence
from pathlib import Path

from neuclip_ds.cli.compare import labelled
from neuclip_ds.cli.program import Parser
from neuclip_ds.errors import UserError


def main(arguments: Sequence[str]) -> None:
    parser = Parser(prog="neuclip-ds watch", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 lets other machines read it")
    parser.add_argument("--port", type=int, default=6007, help="port to listen at; 0 takes a free one")
    parser.add_argument("--every", type=float, default=10.0, help="least seconds between two drawings of the page")
    options = parser.parse(arguments)
    runs = labelled(options.runs)
    absent = [str(run) for run in runs.values() if not run.is_dir()]
    if absent:
        raise UserError(f"{absent[0]} is not a folder; name the folder of a run, such as runs/demo.")
    from neuclip_ds.reporting.live import LivePage, serve  # torch and matplotlib take seconds to import
    from neuclip_ds.training.report import page_of

    os.nice(10)  # the run's processes come first
    with serve(LivePage(runs, page_of, options.every), options.host, options.port) as server:
        host, port = server.server_address[:2]
        print(f"Open http://{host!s}:{port}; Ctrl-C ends it.", flush=True)
        print(f"From another machine: ssh -N -L {port}:localhost:{port} THIS_MACHINE", flush=True)
        server.serve_forever()
