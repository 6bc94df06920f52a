"""A pretrained causal language model of transformers behind the signature of model.Transformer.

    python prepare_data.py sotu --tokenizer=hf:FOLDER      text in the model's own tokens
    python train.py my_llm.py                              with llm = "FOLDER" in the config: LoRA or full fine-tuning

Any model with rotary positions and full attention in every layer will do: its attention calls `model.attend`, so that copies, masks,
packing and the cache are the very ones of the small models. FOLDER may be a name on the hub. This file trains nothing.
"""

import json
from pathlib import Path

import torch
import torch.nn as nn

import fast
from config import UserError
from model import ac_mask, attend
from prepare_data import Pretrained, read_meta

try:
    import transformers
    from safetensors import SafetensorError
except ImportError:
    transformers = None


def attention(module, q, k, v, mask, scaling=None, dropout=0.0, ac_gpt=None, **kwargs):
    """What transformers calls in every layer: q (B, H, L, d), k and v (B, H / groups, L, d) -> (B, L, H, d), None.

    `ac_gpt` is (allowed, caches) of LanguageModel.forward; the mask is None. NotImplementedError where more is asked of attention.
    """
    if more := [
        name for name in ("softcap", "s_aux", "sliding_window", "position_bias") if kwargs.get(name) is not None
    ]:
        raise NotImplementedError(f"its attention has {', '.join(more)}")
    if ac_gpt is None:
        raise NotImplementedError("it does not pass on what its attention needs")
    allowed, caches = ac_gpt
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if caches is not None:
        k, v = caches[module.layer_idx].append(k, v)
    k, v = (x.repeat_interleave(q.size(2) // x.size(2), 2) for x in (k, v))  # heads that share keys and values
    if scaling is not None:
        q = q * (scaling * q.size(-1) ** 0.5)  # attend divides by the root
    if isinstance(allowed, torch.Tensor):
        return attend(q, k, v, allowed, dropout), None
    return attend(q[0], k[0], v[0], allowed, dropout)[None], None


class LanguageModel(nn.Module):
    """forward(tokens, positions, allowed) -> hidden; head(hidden) -> logits, as model.Transformer has them.

    lm: a ...ForCausalLM of transformers, or it in a PeftModel. vocab_size: the ids that its tokenizer has; ids beyond get no
    probability.
    """

    def __init__(self, lm, vocab_size):
        super().__init__()
        self.lm, self.vocab_size = lm, vocab_size

    @property
    def base(self):
        """The model without an adapter's wrapping; the adapter's matrices stay in its layers."""
        return self.lm.get_base_model() if hasattr(self.lm, "get_base_model") else self.lm

    def forward(self, tokens, positions, allowed, rows=..., caches=None):
        """As Transformer.forward; sequences one behind the other are a batch of one for transformers."""
        packed = tokens.dim() == 1
        tokens, positions = (x[None] if packed else x for x in (tokens, positions))
        hidden = self.base.base_model(
            input_ids=tokens, position_ids=positions, use_cache=False, ac_gpt=(allowed, caches)
        ).last_hidden_state
        return (hidden[0] if packed else hidden)[rows]

    @property
    def layers(self):
        n = self.base.config.num_hidden_layers
        return next(x for x in self.base.base_model.children() if isinstance(x, nn.ModuleList) and len(x) == n)

    def caches(self, L):
        return [fast.Cache(L) for _ in range(self.base.config.num_hidden_layers)]

    @property
    def head_weight(self):
        return self.base.get_output_embeddings().weight

    def put_adapter(self, config):
        """Use another adapter on the same frozen model: config.adapter, a folder in peft's format."""
        if not hasattr(self.lm, "load_adapter") or not config.lora_rank:
            raise UserError("--adapter needs a run with an adapter of its own (lora_rank > 0): take another run")
        try:
            about = json.loads((Path(config.adapter) / "adapter_config.json").read_text())
            base = str(about["base_model_name_or_path"])
            if base != config.llm and not (Path(base).is_dir() and Path(base).resolve() == Path(config.llm).resolve()):
                raise UserError(
                    f"--adapter={config.adapter} was trained on {base}, not on {config.llm}: take one of this model"
                )
            ours = json.loads((Path(config.adapter) / "acgpt.json").read_text())
            if ours["method"] != config.method:
                raise UserError(
                    f"--adapter={config.adapter} is of the method {ours['method']}, the run of {config.method}: take another"
                )
            self.lm.load_adapter(config.adapter, "other")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as e:
            what = f"{e}".strip().splitlines()[0][:100]
            raise UserError(
                f"--adapter={config.adapter} cannot be loaded ({what}): give a folder in peft's format"
            ) from None
        self.lm.set_adapter("other")

    def head(self, hidden):
        logits = self.base.get_output_embeddings()(hidden)
        logits[..., self.vocab_size :] = -torch.inf
        return logits


# ---------------------------------------------------------------- loading


def need_transformers():
    if transformers is None or int(transformers.__version__.partition(".")[0]) < 5:
        found = f"found {transformers.__version__}" if transformers else "it is not there"
        raise UserError(f"language models need transformers 5 or newer ({found}): pip install -r requirements-llm.txt")


def why_not(config):
    """Why a model of this configuration cannot take copies of tokens at their own positions; None if it can."""
    if config.get_text_config() is not config:
        return "it is a model of more than text"
    if not all(getattr(config, "no_rope_layers", None) or [True]):
        return "some of its layers see no positions"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    if kinds:
        return f"some of its layers are {', '.join(sorted(kinds))}, which do not see all copies"
    if getattr(config, "sliding_window", None):
        return f"its attention slides over the last {config.sliding_window} tokens and does not see all copies"
    if not getattr(config, "rope_parameters", None):
        return "it has no rotary positions (no rope_parameters): a copy could not keep the position of its original"
    return None


def load(config, vocab_size):
    """The LanguageModel that config.llm names, with the adapter that config asks for (lora_rank > 0), in config.dtype if its own weights
    are not trained, on the CPU.
    """
    need_transformers()
    transformers.AttentionInterface.register("ac_gpt", attention)
    name, frozen = config.llm, config.lora_rank > 0
    try:
        about = transformers.AutoConfig.from_pretrained(name)
        if reason := why_not(about):
            raise UserError(
                f"llm = {name!r} ({about.model_type}): {reason}; take a model with rotary positions, like Llama or Qwen3"
            )
        dtype = getattr(torch, config.dtype) if frozen and config.dtype != "float16" else torch.float32
        lm, how = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
        if how["missing_keys"]:
            raise UserError(f"llm = {name!r} lacks the weights {min(how['missing_keys'])}: take a complete folder")
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as e:
        what = f"{e}".strip().splitlines()[0][:100]
        raise UserError(
            f"llm = {name!r} cannot be loaded ({what}): give a folder of transformers, or go online once"
        ) from None
    head = lm.get_output_embeddings()
    if config.data_folder.exists() and Pretrained(name).sha256 != read_meta(config).get("tokenizer_sha256"):
        fix = f"set tokenizer = 'hf:{name}', and prepare the data with that"
        raise UserError(f"{config.data_folder} holds tokens of another tokenizer than that of llm = {name!r}: {fix}")
    if head.weight.size(0) < vocab_size:
        raise UserError(
            f"llm = {name!r} has {head.weight.size(0)} ids, its tokenizer {vocab_size}: they do not belong together"
        )
    if head.bias is not None and not frozen:
        raise UserError(
            f"llm = {name!r}: its head has a bias, which would not be trained: give --lora_rank=16, or another model"
        )
    check_wrapping(lm, vocab_size, name)
    if config.gradient_checkpointing:
        enable = (
            getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
        )  # the older name
        enable({"use_reentrant": False})
    return LanguageModel(with_adapter(lm, config) if frozen else lm, vocab_size)


@torch.no_grad()
def check_wrapping(lm, vocab_size, name):
    """Switch a model to our attention, and make sure that it still computes what it computes with a mask of AC-GPT's shape given to
    its own: three copies and five tokens of the body.
    """
    lm.eval()
    tokens = torch.randint(min(vocab_size, 1000), (1, 8), generator=torch.Generator().manual_seed(0))
    positions, mask = torch.tensor([[2, 4, 6, 0, 1, 2, 3, 4]]), ac_mask(torch.ones(1, 8, dtype=torch.bool), 3)
    before = lm(input_ids=tokens, position_ids=positions, attention_mask=mask[:, None], use_cache=False).logits
    lm.set_attn_implementation("ac_gpt")
    body = LanguageModel(lm, vocab_size)
    caches, twice = body.caches(8), [x[0].repeat(2) for x in (tokens, positions)]
    why = "it does not ask for the attention that it is given"
    try:
        after = [body(tokens, positions, mask, caches=caches)[0], *body(*twice, [(3, 8)] * 2).split(8)]
        if all(cache.n == 8 for cache in caches):
            before, after = before[0, :, :vocab_size], body.head(torch.stack(after))[..., :vocab_size]
            slots = (before - after).abs().amax(-1) / before.abs().amax(-1)
            exact = before.dtype == torch.float32  # in bfloat16, rounding alone may turn a slot upside down
            differs = (slots.max() if exact else slots.float().median()).item()
            if differs < (1e-4 if exact else 0.1):
                return
            why = f"its logits differ by {differs:.0%}, perhaps because it caps or scales them"
    except (NotImplementedError, TypeError) as e:
        why = str(e)
    raise UserError(
        f"llm = {name!r} ({lm.config.model_type}) does not work with our attention ({why}): take another model"
    )


def with_adapter(lm, config):
    """LoRA (Hu et al., 2021) by peft: lora_rank, lora_alpha, lora_targets (names of linear layers, or all-linear)."""
    try:
        import peft
    except ImportError:
        raise UserError(
            "lora_rank > 0 needs peft: pip install -r requirements-llm.txt, or --lora_rank=0 for all weights"
        ) from None
    targets = config.lora_targets if config.lora_targets == "all-linear" else config.lora_targets.split(",")
    about = peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    try:
        lm = peft.get_peft_model(lm, about)
        if type(lm.get_base_model().get_output_embeddings()) is not nn.Linear:
            raise ValueError("the head cannot have an adapter")
        return lm
    except ValueError as e:
        raise UserError(f"lora_targets = {config.lora_targets!r}: {str(e).splitlines()[0][:100]}") from None
