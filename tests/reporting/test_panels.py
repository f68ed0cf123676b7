"""Every metric of a run has a place in its report, with its meaning."""

from __future__ import annotations

from neuclip_ds.reporting.panels import PANELS, panels_of


def test_every_panel_says_what_it_shows():
    assert all(panel.unit and panel.meaning.endswith(".") for panel in PANELS)
    assert len({panel.title for panel in PANELS}) == len(PANELS)


def test_a_metric_without_a_panel_gets_one_and_counts_do_not():
    names = ["loss", "mine", "retrieval_pairs", "chance/zero_shot_top1", "npn_ratio_max"]
    assert [panel.title for panel in panels_of(names)] == ["Training loss", "NPN ratio, largest", "mine"]


def test_runs_share_a_plot_for_each_metric():
    (recall,) = panels_of(["image_to_text_recall@1", "image_to_text_recall@10"])
    parts = recall.split(["image_to_text_recall@1", "image_to_text_recall@10", "loss"])
    assert [part.title for part in parts] == ["Image to text recall: recall@1", "Image to text recall: recall@10"]
    assert [part.has("image_to_text_recall@10") for part in parts] == [False, True]


def test_averaged_weights_share_a_plot_with_the_others_of_a_run_alone():
    (recall,) = panels_of(["image_to_text_recall@1", "ema/image_to_text_recall@1"])
    parts = recall.split(["image_to_text_recall@1", "ema/image_to_text_recall@1"])
    assert [part.title for part in parts] == ["Image to text recall: recall@1", "Image to text recall: recall@1, EMA"]
    assert [part.has("ema/image_to_text_recall@1") for part in parts] == [False, True]
