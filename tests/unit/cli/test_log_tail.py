"""A starting replica's newest word."""

from __future__ import annotations

from pathlib import Path

from deployments.cli.log_tail import LogTail

LINE = "\x1b[36m(ServeReplica:brimful:replica-0 pid=1)\x1b[0m INFO 2026-01-01 replica-0 abc -- starting: {}\n"


def test_the_newest_whole_line_counts_and_is_kept_until_another_comes(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text("INFO something else\n")
    tail = LogTail(log)
    assert tail.newest() == ""
    with log.open("a") as out:
        out.write(LINE.format("loading the weights") + LINE.format("warming up") + LINE.format("half a li")[:-1])
        out.flush()
        assert tail.newest() == "warming up"
        out.write("ne\n")
        out.flush()
        assert tail.newest() == "half a line"
        out.write("INFO something else\n")
        out.flush()
        assert tail.newest() == "half a line"


def test_rays_remark_about_repeated_lines_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    log.write_text(LINE.format("warming up\x1b[32m [repeated 2x across cluster]\x1b[0m"))
    assert LogTail(log).newest() == "warming up"
