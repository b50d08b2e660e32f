"""Responses sampled by a vLLM engine, which is given the policy's weights after each iteration."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from .errors import InputError
from .rollout import Responses, context_length

# Of the keys and values of running requests, where vLLM would take a share of all memory.
CPU_CACHE_GIB = "1"


class StaleWeightsError(RuntimeError):
    """The engine would sample from a policy that is no longer the trainer's."""


class VLLMRollout:
    """A vLLM engine; also the trainer's weight sender."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int,
        dtype: str,
        seed: int,
    ) -> None:
        on_cpu = next(model.parameters()).device.type == "cpu"
        if on_cpu:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CPU_CACHE_GIB)
        # The engine's processes would draw bars and print notes at each new set of weights.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TQDM_DISABLE", "1")
        disable_progress_bar()
        try:
            from vllm import LLM
        except ImportError as error:
            raise InputError(
                f"--rollout vllm: {error}; see the README for how to install it"
            ) from None
        self.model = model
        self.max_new_tokens = max_new_tokens
        self.end_id = tokenizer.eos_token_id
        self._directory = tempfile.TemporaryDirectory(prefix="grpo-weights-")
        tokenizer.save_pretrained(self._directory.name)
        self._save()
        self._loaded = self._policy_version()
        self.engine = LLM(
            model=self._directory.name,
            dtype=dtype,
            seed=seed,
            max_model_len=context_length(model),
            enforce_eager=on_cpu,
            use_tqdm_on_load=False,
            **({} if on_cpu else {"gpu_memory_utilization": 0.4}),  # the trainer needs the rest
        )

    def __call__(self, prompts: list[list[int]], samples: int) -> Responses:
        """`samples` responses to each prompt."""
        from vllm import SamplingParams

        version = self._policy_version()
        if version != self._loaded:
            raise StaleWeightsError(
                f"vLLM has version {self._loaded} of the policy's weights and the trainer is at "
                f"{version}: update_weights() must come before sampling"
            )
        parameters = SamplingParams(
            n=samples,
            temperature=1.0,
            max_tokens=self.max_new_tokens,
            logprobs=0,  # of the sampled token alone
            stop_token_ids=[self.end_id],
            seed=int(torch.randint(1 << 31, ())),
            detokenize=False,
        )
        outputs = self.engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False
        )
        tokens, log_probs = [], []
        for output in outputs:
            for sample in sorted(output.outputs, key=lambda sample: sample.index):
                tokens.append(list(sample.token_ids))
                log_probs.append(
                    [
                        scores[token].logprob
                        for token, scores in zip(sample.token_ids, sample.logprobs, strict=True)
                    ]
                )
        return Responses(tokens, log_probs)

    def update_weights(self) -> None:
        """Have the engine load the policy's weights; what it had cached is of the old ones."""
        self._save()
        self.engine.collective_rpc("reload_weights", kwargs={"weights_path": self._directory.name})
        self.engine.reset_prefix_cache()
        self._loaded = self._policy_version()

    def _save(self) -> None:
        self.model.save_pretrained(Path(self._directory.name))

    def _policy_version(self) -> int:
        """Grows with each change in place of the parameters."""
        return sum(parameter._version for parameter in self.model.parameters())
