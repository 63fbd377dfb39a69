"""One command line in this process."""

from pathlib import Path

import pytest

from memfit.cli import main
from tests.cli.asking import RIGHT, ROOT, Run, really


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs one command line at the project's root, in this process."""
    monkeypatch.chdir(ROOT)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        return int(caught.value.code or 0), *capfd.readouterr()

    return call


@pytest.fixture(scope="package")
def plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The text of a plan of three micro-batches."""
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    sizes = ["--global-batch", "8", "--micro-batch", "3", "--memory", "256MiB"]
    code, _, err = really("plan", RIGHT, *sizes, "--out", str(path))
    assert code == 0, err
    return path.read_text()


@pytest.fixture(scope="package")
def plan_file(plan: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that holds this plan."""
    path = tmp_path_factory.mktemp("good") / "plan.toml"
    path.write_text(plan)
    return path
