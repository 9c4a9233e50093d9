"Progress bars: what is left of them in the output of a cell"
import IPython.display
import pytest

from bmlab.core import _leaves_nothing

pytest.importorskip("ipywidgets", reason="tqdm's bars of a notebook need ipywidgets")
notebook = pytest.importorskip("tqdm.notebook")


class Place:
    def __init__(self, widget): self.shown, self.widget = [widget], widget
    def update(self, data, raw): self.shown.append(data["text/plain"])


@pytest.fixture
def places(monkeypatch):
    "What is displayed, in its order"
    found = []
    def display(widget, display_id):
        found.append(Place(widget))
        return found[-1]
    monkeypatch.setattr(IPython.display, "display", display)
    return found


def test_a_bar_that_is_gone_leaves_nothing_to_be_found_broken(places):
    bar = _leaves_nothing(notebook.tqdm)
    assert list(bar(range(3), leave=False)) == [0, 1, 2] and [p.shown[1:] for p in places] == [[""]]
    assert places[0].widget.comm is None                            # closed
    list(bar(range(3), desc="kept"))
    assert places[1].shown[1].startswith("kept: 100%")
    with pytest.raises(ZeroDivisionError):
        for i in bar(range(9), desc="cut off", leave=False): 1 / (4 - i)
    assert places[2].shown[1].startswith("cut off:  44%") and len(places[2].shown) == 2


def test_a_bar_of_short_work_does_not_appear(places):
    bar = _leaves_nothing(notebook.tqdm)
    list(bar(range(3), delay=60, leave=False))
    list(bar(range(3), disable=True))
    assert places == []


def test_a_terminals_bar_is_tqdms_own():
    from tqdm.std import tqdm
    assert _leaves_nothing(tqdm) is tqdm


def test_it_is_found_by_its_name_elsewhere():
    bar = _leaves_nothing(notebook.tqdm)
    assert (bar.__module__, bar.__qualname__) == ("bmlab.core", "tqdm")
