"""lora.py push: the folder that goes to the hub and its model card, read with the hub's own client."""
import json

import pytest
from huggingface_hub import ModelCard, constants
from peft import PeftModel
from transformers import HiggsAudioV2ForConditionalGeneration

import lora
from speech import text_normalization


@pytest.fixture
def pushed(forked, tmp_path):
    """(checkpoint of a short run, push(*flags, ok=True))."""
    run = forked("--use_lora", "--use_dora", "--lora_rank", 3, "--max_steps", 2, "--eval_steps", 1, "--save_steps", 0,
                 "--validation_split", 0.2, "--normalize_text", "off")
    checkpoint = run.output_dir / "checkpoint-2"

    def push(*flags):
        lora.main(["push", "--adapter", str(checkpoint), "--output_dir", str(tmp_path / "card"), "--repo_id",
                   "me/anna", *flags])
    return checkpoint, push


@pytest.mark.slow
def test_the_folder_is_complete_and_its_card_tells_of_the_run(tiny, pushed, tmp_path, capsys, monkeypatch):
    checkpoint, push = pushed
    with pytest.raises(SystemExit):
        push("--dry_run")           # the tiny base has no name on the hub
    assert "give --base_model OWNER/NAME" in capsys.readouterr().err
    for name in (".env", "notes.txt", "model.pt", "model_secret.safetensors", "notes_config.json"):
        (checkpoint / name).write_text("secret")
    (checkpoint / ".git").mkdir()
    (checkpoint / "LICENSE").symlink_to("/etc/hostname")
    push("--dry_run", "--base_model", "bosonai/base", "--language", "de", "no")
    assert "not uploaded: .env, .git, LICENSE, model.pt, model_secret.safetensors, notes.txt, notes_config.json" in capsys.readouterr().out
    folder = tmp_path / "card"
    assert {path.name for path in folder.iterdir()} == {"README.md", "adapter_config.json", text_normalization.FILE,
                                                        "adapter_model.safetensors"}
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "bosonai/base"
    PeftModel.from_pretrained(HiggsAudioV2ForConditionalGeneration.from_pretrained(tiny.model), folder)
    card = ModelCard.load(folder / "README.md")
    assert card.data.to_dict() == {
        "license": "other", "license_name": "boson-higgs-audio-2-community-license", "base_model": "bosonai/base",
        "license_link": "https://huggingface.co/bosonai/base/blob/main/LICENSE", "base_model_relation": "adapter",
        "pipeline_tag": "text-to-speech", "library_name": "peft", "language": ["de", "no"]}
    data = json.loads((checkpoint / "trainer_state" / "state.json").read_text())["data"]
    rows = [json.loads(line) for line in (checkpoint.parent / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for row in rows for key, value in row.items()}
    for said in (f"| data | {data['samples']} samples, {data['hours']:.2f} h", "| optimizer steps | 2 |",
                 "adapters, rank 3, alpha 32, attention, DoRA", "# Higgs Audio 2: anna", "was not normalised",
                 f"| training loss | {last['train/loss']:.4f} at step 2 (",
                 f"| validation loss | {last['eval/loss']:.4f} at"):
        assert said in card.text, said
    assert data["samples"] == 19 and 0 < data["hours"] < 0.1

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit) as end:
        lora.main(["push", "--adapter", str(checkpoint), "--output_dir", str(tmp_path / "two"), "--repo_id", "me/anna",
                   "--base_model", "bosonai/base"])
    error = capsys.readouterr().err
    assert end.value.code == 1 and error.startswith("error: --repo_id me/anna: not uploaded (")
    assert f"hf upload me/anna {tmp_path / 'two'}" in error and (tmp_path / "two" / "README.md").exists()
