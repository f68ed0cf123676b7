"""One command line for several methods: each takes the options that it reads."""

from benchmarking.method_config import config_for


def test_several_methods_share_a_command_line() -> None:
    shared = ["demo", "--objective.npn.lr=3", "--objective.eps=1e-6"]
    for method in ("openclip", "neuclip", None):
        config = config_for(method, shared)
        assert config.objective.method == (method or "neuclip_queue")
        assert config.objective.eps == 1e-6
        assert config.objective.npn.lr == (3 if method == "neuclip" else None)
