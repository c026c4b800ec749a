"""lm-eval-harness on a block-diffusion checkpoint, so that its numbers compare with those of other projects.

    pip install lm_eval
    python diffusion/lm_eval_bd3lm.py --checkpoint out --tasks gsm8k

Tasks that generate (output_type generate_until) run as the harness defines them, answers greedy; of its settings for
generation only `until` counts. Tasks that compare likelihoods (loglikelihood) get a Monte Carlo bound of each, from
--draws draws of the noise: the likelihood itself only in blocks of one token. A task's text is the prompt as it stands,
and a model trained with --chat gets it as the user's turn. The stock gsm8k task without examples asks what a model of
--system gsm8k was trained on; examples (--num_fewshot 5) it has never seen.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))    # common/ stands beside this folder

from common import flags
from diffusion.model_flags import answer_flags, checkpoint_flags


def build_parser():
    p = flags.Parser("Run tasks of lm-eval-harness on a block-diffusion model.")
    checkpoint_flags(p)
    answer_flags(p, "confidence")
    p.add_argument("--tasks", nargs="+", default=["gsm8k"], help="names of tasks")
    p.add_argument("--include_path", help="folder with task files of your own")
    p.add_argument("--num_fewshot", type=int, default=0, help="worked examples before each question")
    p.add_argument("--limit", type=int, default=0, help="only the first so many problems of each task, 0 = all")
    p.add_argument("--output", help="JSON file for the results (default: beside the checkpoint)")
    return p


def check_flags(args, world_size):
    """Raise UserError for values that make no sense."""
    flags.at_least_one(args, "batch_size", "draws")
    flags.zero_or_more(args, "limit", "num_fewshot")


# parsed before torch is imported: --help and a mistake in a flag answer at once
ARGS = flags.parse(build_parser(), check_flags) if __name__ == "__main__" else None

from common import checkpoint, distributed
from common.distributed import UserError
from diffusion.answers import answer_batch, load_solver, text_state
from diffusion.sampler import Sampling


def harness_model(base, solver, batch_size, draws):
    """An object of a subclass of `base`, lm_eval's LM: texts, and bounds by so many draws. solver: answers.Solver."""
    tokens, layout = solver.tokens, solver.layout

    class BlockDiffusion(base):
        too_long = 0        # questions without room: an answer is "" then, a context loses its first tokens
        bounds = 0          # texts whose likelihood was bounded

        def generate_until(self, requests, disable_tqdm=False):
            """Texts in the order of the requests, whose args are (prompt, {"until": [text], ...})."""
            states, texts = [], [""] * len(requests)
            for number, request in enumerate(requests):
                prompt = request.args[0]
                if layout.prompt:
                    prompt = layout.prompt.replace("{question}", prompt)
                try:
                    states.append((number, text_state(f"request {number}", prompt, tokens, layout)))
                except UserError:
                    self.too_long += 1
            states.sort(key=lambda item: item[1][0].shape[1])       # like lengths side by side: less padding
            for first in range(0, len(states), batch_size):
                numbers, batch = zip(*states[first:first + batch_size])
                for number, answer in zip(numbers, answer_batch(solver, batch, first)):
                    until = requests[number].args[1].get("until") or []
                    for stop in [until] if isinstance(until, str) else until:
                        answer["text"] = answer["text"].partition(stop)[0] if stop else answer["text"]
                    texts[number] = answer["text"]
            return texts

        def loglikelihood(self, requests, disable_tqdm=False):
            from diffusion import likelihood
            self.bounds += len(requests)
            found, cut = likelihood.request_bounds(solver, requests, draws, batch_size, 0)
            self.too_long += cut
            return found

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise UserError("this task scores texts without a question, which this model was not trained on")
    return BlockDiffusion()


def main(argv=None):
    args = ARGS or flags.parse(build_parser(), check_flags, argv)
    with distributed.one_clear_error():
        try:
            import lm_eval
            from lm_eval.api.model import LM
        except ImportError:
            raise UserError("lm_eval is not installed: pip install lm_eval")
        folder, solver = load_solver(args, Sampling(args.order, threshold=args.threshold, temperature=0.0))
        layout = solver.layout
        if layout.system == "hdp":
            raise UserError(f"--checkpoint {folder}: is an hdp model, which writes a plan first; give one "
                            "of --system gsm8k or chat")
        ours = harness_model(LM, solver, args.batch_size, args.draws)
        found = lm_eval.simple_evaluate(
            model=ours, tasks=args.tasks, num_fewshot=args.num_fewshot, limit=args.limit or None, bootstrap_iters=0,
            log_samples=False,
            task_manager=lm_eval.tasks.TaskManager(include_path=args.include_path))
        output = Path(args.output or folder.parent / f"lm-eval-{folder.name}.json")
        checkpoint.write_json(output, {
            "checkpoint": str(folder), "lm_eval": lm_eval.__version__,
            "settings": flags.stored(args), "too_long": ours.too_long,
            "monte_carlo_bounds": ours.bounds, "results": found["results"]}, default=str)
        for task, metrics in found["results"].items():
            for name, value in metrics.items():
                if isinstance(value, float):
                    print(f"{task:<20} {name:<40} {value:.4f}")
        if ours.bounds:
            print(f"bounds     the likelihoods of {ours.bounds} texts are Monte Carlo bounds of {args.draws} draws")
        print(f"settings   lm_eval {lm_eval.__version__}, {args.num_fewshot} examples, {args.order}, temperature 0, "
              f"blocks of {layout.block_size}, at most {layout.max_length} tokens, "
              f"{'averaged' if args.ema else 'last'} weights; {ours.too_long} questions too long\n"
              f"results    {output}")


if __name__ == "__main__":
    main()
