"""A teacher in this process by vLLM, on the GPUs that this process sees."""
from common.flags import UserError
from distill.teacher import Answer, fitting, need_template, opens_thought


def open_vllm(name, draw, *, max_model_len=0, seed=0, chunk_size=1024, **options):
    """`answers` of teacher.py by a model folder or hub name. draw: Sampling.

    max_model_len 0: the model's own. chunk_size: requests given to vLLM together; the next ones
    wait for all of them. options: of vllm.LLM, tensor_parallel_size say.
    """
    try:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
    except ImportError as error:
        raise UserError(f"--engine vllm: vLLM cannot be imported ({error}); install it, or give "
                        "--base_url")
    llm = LLM(model=name, max_model_len=max_model_len or None, max_logprobs=max(20, draw.logprobs),
              enable_prefix_caching=True, seed=seed, **options)
    tokenizer, flags = llm.get_tokenizer(), draw.template_flags
    need_template(tokenizer, name)
    begin, limit = opens_thought(tokenizer, flags), llm.llm_engine.model_config.max_model_len

    def sampling(request):
        constraint = StructuredOutputsParams(**request.constraint) if request.constraint else None
        return SamplingParams(
            temperature=draw.temperature, top_p=draw.top_p, top_k=draw.top_k, seed=request.seed,
            max_tokens=draw.max_tokens, logprobs=draw.logprobs or None,
            structured_outputs=constraint)

    def alternatives(row):
        best = sorted(row.values(), key=lambda token: token.rank)[:draw.logprobs]
        return [(token.decoded_token, token.logprob) for token in best]

    def answers(take):
        while requests := take(chunk_size):
            # one that does not fit would end the whole call
            fits, rest = fitting(requests, tokenizer, flags, limit - 1)
            yield from rest
            asked = [request for request, _ in fits]
            outputs = llm.chat([request.messages for request in asked], list(map(sampling, asked)),
                               use_tqdm=False, chat_template_kwargs=flags or None) if asked else []
            for request, out in zip(asked, outputs):
                best = out.outputs[0]
                tokens = [(row[i].decoded_token, alternatives(row))
                          for i, row in zip(best.token_ids, best.logprobs or [])]
                yield request, Answer(begin + best.text, best.finish_reason,
                                      len(out.prompt_token_ids), len(best.token_ids),
                                      out.num_cached_tokens, tokens=tokens)
    return answers
