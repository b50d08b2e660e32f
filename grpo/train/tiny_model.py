"""The default model: a Llama of 0.3 M parameters and its word-level tokenizer, built in process."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
WORDS = ("sort", "add", "make", "from", "the", "is", "of", "and", "to", "in", "what", "answer")
SYMBOLS = tuple("0123456789+-*/()=,.:?!%<>[]")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words, digits and signs, one token each; padding is not the end of a turn."""
    vocabulary = (PAD, UNKNOWN, START, END, *ROLES, *WORDS, *SYMBOLS)
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"[a-z]+|."), behavior="isolated"),
        ]
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """Random weights, from torch's generator."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
    )
    return LlamaForCausalLM(config)
