"""The speech curve: each checkpoint's row has its own losses and judgement, and its last step is judged."""
import json

import pytest

from bench import table, voice_curve


def judgement(wer):
    return {"wer": wer, "shuffled_wer": 0.9, "nearer_pitch": 1.0, "stop_rate": 0.975}


def test_a_row_has_the_losses_of_its_step(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["voice_curve.py", "work", "--steps", "400"])
    judged = {"recordings": judgement(0.0), "0": judgement(0.969), "200": judgement(0.4)}
    assert voice_curve.report(tmp_path, judged)["tables"]["curve"]["rows"][0][:5] == ["0", 0, None, None, 96.9]
    rows = [{"step": 200, "train/audio_loss": 0.5}, {"step": 200, "eval/audio_loss": 0.6},
            {"step": 250, "train/audio_loss": 0.4}]
    (tmp_path / "curve").mkdir()
    (tmp_path / "curve" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = voice_curve.report(tmp_path, judged)
    assert report["command"] == "python bench/voice_curve.py OUT_DIR --steps 400"
    assert report["tables"]["curve"]["rows"] == [
        ["0", 0, None, None, 96.9, 90.0, 100.0, 97.5], ["200", 3200, 0.5, 0.6, 40.0, 90.0, 100.0, 97.5],
        ["recordings", None, None, None, 0.0, 90.0, 100.0, 97.5]]
    assert table.markdown(report["tables"]["curve"])[-1].startswith("| recordings |  |  |  | 0.00 |")


def test_steps_that_would_end_unjudged_are_refused(capsys):
    with pytest.raises(SystemExit):
        voice_curve.parse(["work", "--steps", "500", "--every", "200"])
    assert "its end would not be judged" in capsys.readouterr().err
