"""The flags of train_v2_ddp.py are a fixed list. Old names are accepted, but --help does not show them."""
import re

from core import cli
from tests.helpers.trainer import script_flags

FLAGS = """adam_beta2 audio_tokenizer_path auto base_dtype bf16 code_cache collective_timeout compile
    config cpu_offload drop_bad dry_run eval_data_file eval_steps float8 fp16 freeze_llm
    global_batch_size gpu_memory gradient_accumulation_steps gradient_checkpointing
    group_by_length help keep keep_weight learning_rate logging_dir logging_steps lora_alpha
    lora_dropout lora_rank lora_target_modules lr_scheduler max_bad_steps max_grad_norm max_length
    max_steps max_tokens_per_batch model_path normalize_text num_train_epochs num_workers
    output_dir parallel per_device_eval_batch_size per_device_train_batch_size preprocess_num_proc
    report_to reshard_after_forward resume sample_prompts sample_seconds save_steps
    save_total_limit seed text_loss_weight tf32 train_audio_table train_data_file use_dora
    use_lora use_rslora validation_split wandb_project warmup_steps weight_decay"""
# accepted, not shown: flags of prepare_tts.py and rarely used ones
HIDDEN = """columns disable_eval drop_too_long eval_data_dir keep_every
    reference reference_share task_type train_data_dir wait_timeout"""


def test_the_list_is_frozen():
    """A new flag replaces an old one."""
    parser = script_flags()[0]
    shown = re.findall(r"^  (?:-h, )?--(\w+)", parser.format_help(), re.M)
    assert sorted(shown) == sorted(FLAGS.split()) and len(shown) <= 66       # with --help
    accepted = {action.dest for action in parser._actions} - {
        flag.removeprefix("--") for flag in (*cli.OLD_NAMES, *cli.WITHOUT_EFFECT)}
    assert accepted == {*shown, *HIDDEN.split()} - {"train_data_dir", "eval_data_dir"}
    assert not {f"--{name}" for name in shown} & {*cli.OLD_NAMES, *cli.WITHOUT_EFFECT}
