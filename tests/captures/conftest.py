"""`--captures DIR`: judge against another folder of captures (default: the ones in tests/data/captures)."""

from pathlib import Path

import pytest

from rnic_tb.captures import load

DEFAULT = Path(__file__).parents[1] / "data" / "captures"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--captures", default=str(DEFAULT), help="folder of NAME.pcap and NAME.json")


def captures_folder(config: pytest.Config) -> Path:
    """The folder asked for; the option is unknown when pytest was started above this folder."""
    return Path(config.getoption("--captures", default=str(DEFAULT)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`capture_path`: every capture, or those the module's table REPLAYED takes for the test."""
    if "capture_path" not in metafunc.fixturenames:
        return
    paths = sorted(captures_folder(metafunc.config).glob("*.json"))
    takes = getattr(metafunc.module, "REPLAYED", {}).get(metafunc.function.__name__, lambda name: True)
    chosen = [path for path in paths if takes(path.stem)]
    metafunc.parametrize("capture_path", chosen, ids=[path.stem for path in chosen])


@pytest.fixture
def scenario(capture_path: Path):
    """The capture as a scenario."""
    return load(capture_path)
