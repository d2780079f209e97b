"""Memory in `draftwood info`."""

from __future__ import annotations

import json

from click.testing import CliRunner

from draftwood.cli import main
from draftwood.cli.memory import fits, largest_batch

VERIFY = {"weights": 40, "libraries": 10, "KV pages": 80}
DRAFT = {"weights": 10, "libraries": 10, "context cache": 20}


def test_the_largest_batch_leaves_room_for_what_does_not_grow() -> None:
    assert largest_batch([VERIFY], 4, 130) == 4
    assert largest_batch([VERIFY], 4, 129) == 3
    assert largest_batch([VERIFY, DRAFT], 4, 169) == 3
    assert largest_batch([VERIFY], 4, 49) == 0


def test_what_fits_is_said_for_each_place_and_service() -> None:
    rows = fits({"verify": VERIFY, "draft": DRAFT}, 4, {"this machine": 170, "GPU 0": 60})
    assert rows["both services, this machine"].endswith("fits; --max-batch up to 4")
    assert rows["draft service, GPU 0"].endswith("fits; --max-batch up to 8")
    assert rows["verify service, GPU 0"].endswith("does not fit; not even one sequence does")


def test_sizes_follow_the_flags() -> None:
    def kv(*args: str) -> str:
        result = CliRunner().invoke(main, ["info", "--draft", "none", "--json", "--dtype", "float32", *args])
        assert result.exit_code == 0, result.output
        return json.loads(result.output)["memory: verify service"]["KV pages"]

    assert kv("--max-batch", "3", "--max-context", "64", "--page-size", "64") == "0.5 MiB"
    assert kv("--max-batch", "7", "--max-context", "64", "--page-size", "64") == "1.0 MiB"


def test_a_setting_that_cannot_be_served_is_named() -> None:
    result = CliRunner().invoke(main, ["info", "--draft", "none", "--max-context", "4096"])
    assert result.exit_code != 0
    assert "--max-context is 4096, more than the 2048 positions of the target" in result.output
