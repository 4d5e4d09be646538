"""TRL's trainers on prompts with images, beside stock TRL."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("PIL")

import setups_trl as setups
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, ProcessorMixin, Qwen2_5_VLProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer
from truth_trl import WithTruth, dense_head, run_with_truth

from forkpoint import Config
from forkpoint.hosts.transformers.families import MULTIMODAL
from forkpoint.integrations.trl import shared_trainer

sys.path.append(str(Path(__file__).parents[1]))
from lanes import slow_besides
from multimodal_models import tiny_multimodal

BAR = 2e-6
ROUNDS_MORE = ("qwen3_5", "qwen3_5_moe", "gemma3", "gemma4")
"""Families whose recurrences or norms multiply rounding."""
FAIL_IN_TRL = {
    "llama4": "no attribute 'last_hidden_state'",
    "glm4v_moe": "no attribute 'num_experts'",
}
"""Families with which TRL's trainers fail, and the error."""
START, PAD = "<|vision_start|>", "<|image_pad|>"
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    f"{{% if part['type'] == 'image' %}}{START} {PAD} "
    "{% else %}{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"
)
pytestmark = pytest.mark.filterwarnings("ignore")


class ImagesAlone(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without video, whose own needs torchvision."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


class Tiles(InternVLProcessor):
    """InternVL's processor without video."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        super().__init__(image_processor, tokenizer, None, 4, chat_template)


class Lines(ProcessorMixin):
    """As Pixtral's processor, whose own needs torchvision: a token ends each line of patches."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_token_id = PAD, tokenizer.convert_tokens_to_ids(PAD)

    def replace_image_token(self, image_inputs: dict, image_idx: int, **_: Any) -> str:
        height, width = image_inputs["image_sizes"][image_idx]
        return (PAD * (width // 4) + START) * (height // 4)


class Idefics(SmolVLMProcessor):
    """SmolVLM's processor without video, whose own needs another package."""

    video_processor: Any = SimpleNamespace(num_frames=1, fps=1)

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        self.image_token, self.fake_image_token, self.global_image_token = PAD, START, START
        self.video_token, self.image_seq_len = "<|video_pad|>", 4
        self.image_token_id = tokenizer.convert_tokens_to_ids(PAD)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor(family: str = "qwen2_5_vl") -> Any:
    special = ["<|vision_start|>", "<|image_pad|>", "<|video_pad|>"]
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, 61)), *special]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = Whitespace()
    inner.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        additional_special_tokens=special,
    )
    given: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": TEMPLATE}
    square = {"height": 16, "width": 16}
    if family == "llava":
        images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square)
        sizes = {"patch_size": 4, "num_additional_image_tokens": 1}
        given |= {"vision_feature_select_strategy": "default", "image_token": PAD}
        return LlavaProcessor(images, **given, **sizes)
    if family == "mistral3":
        images = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size=4)
        return Lines(images, **given)
    if family == "internvl":
        names = {"start_image": START, "end_image": START, "context_image": PAD}
        for name, token in {**names, "video": "<|video_pad|>"}.items():
            setattr(tokenizer, f"{name}_token", token)
            setattr(tokenizer, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        images = GotOcr2ImageProcessorPil(size=square, crop_to_patches=True, max_patches=3)
        return Tiles(images, **given)
    if family == "smolvlm":
        edge = {"longest_edge": 16}
        images = SmolVLMImageProcessorPil(
            size=edge, max_image_size=edge, do_image_splitting=False, do_pad=True
        )
        return Idefics(images, **given)
    size = {"shortest_edge": 64, "longest_edge": 64 * 64}
    images = Qwen2VLImageProcessorPil(size=size, patch_size=4, temporal_patch_size=2, merge_size=2)
    return ImagesAlone(images, tokenizer, TEMPLATE)


def model(family: str) -> Any:
    # Llama 4's attention scales differ from the position `floor_scale` on, and count left padding.
    text = {"floor_scale": 8192} if family == "llama4" else {}
    return setups.ending(tiny_multimodal(family, dtype=torch.float32, **text))


def pictures(count: int = 16, *, paired: bool = False, sizes: int = 2, most: int = 1) -> Dataset:
    """Prompts of words around images of two sizes, at most so many; `paired`: with two completions
    each."""
    generator = torch.Generator().manual_seed(1)

    def image(rows: int, columns: int) -> Image.Image:
        pixels = torch.randint(0, 255, (4 * rows, 4 * columns, 3), generator=generator)
        return Image.fromarray(pixels.numpy().astype("uint8"))

    def text(length: int = 4) -> dict[str, Any]:
        ids = torch.randint(3, 61, (length,), generator=generator).tolist()
        return {"type": "text", "text": " ".join(f"w{i}" for i in ids)}

    def row(n: int) -> dict[str, Any]:
        images = [image(4, 4 + 2 * (n % sizes)) for _ in range(1 + n % most)]
        parts = [part for _ in images for part in ({"type": "image"}, text())]
        found = {"prompt": [{"role": "user", "content": [text(), *parts]}], "images": images}
        if paired:
            for length, name in enumerate(("chosen", "rejected"), 2):
                found[name] = [{"role": "assistant", "content": [text(length + n % 3)]}]
        return found

    return Dataset.from_list([row(n) for n in range(count)])


def trainer(
    cls: type, folder: Path, family: str, own: Any = None, *, sizes: int = 2, **options: Any
) -> Any:
    classes = {x.__name__.removesuffix("Trainer").lower() for x in cls.__mro__}
    (kind,) = classes & setups.CONFIGS.keys()
    most = 1 if family.startswith("qwen") else 2
    dataset = pictures(paired=kind == "dpo", sizes=sizes, most=most)
    kwargs: dict[str, Any] = {"train_dataset": dataset}
    made = model(family)
    if kind == "dpo":
        kwargs |= {"ref_model": setups.near(made)}
    else:
        # TRL keeps image tokens from being sampled, and no others that stand for media.
        options |= {"generation_kwargs": {"bad_words_ids": [[61], [63]]}, **setups.SAMPLED}
        kwargs |= {"reward_funcs": [setups.reward]}
    if kind == "rloo":
        setups.near(made).save_pretrained(folder / "reference")
        made.config._name_or_path = str(folder / "reference")
    args = setups.CONFIGS[kind](str(folder), **{**setups.COMMON, **options})
    torch.manual_seed(0)
    return cls(model=made, args=args, processing_class=processor(family), **kwargs, **(own or {}))


CASES: dict[str, tuple[type, str, dict[str, Any]]] = {
    "grpo": (GRPOTrainer, "qwen2_5_vl", {"max_steps": 2}),
    "dapo": (GRPOTrainer, "qwen3_vl", {"loss_type": "dapo"}),
    "rloo": (RLOOTrainer, "qwen3_vl", {}),
    "dpo": (DPOTrainer, "qwen2_5_vl", {}),
    "llava": (GRPOTrainer, "llava", {}),
    "mistral3": (GRPOTrainer, "mistral3", {}),
    "internvl": (GRPOTrainer, "internvl", {}),
    "smolvlm": (GRPOTrainer, "smolvlm", {}),
    "rloo llava": (RLOOTrainer, "llava", {}),
    "dpo mistral3": (DPOTrainer, "mistral3", {}),
    "dpo smolvlm": (DPOTrainer, "smolvlm", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_stock_trl(name: str, tmp_path: Path) -> None:
    cls, family, options = CASES[name]
    own = {"forkpoint": Config(sharing="tree", boundary="within")}
    ours = trainer(shared_trainer(cls), tmp_path / "ours", family, own, **options)
    stock = trainer(cls, tmp_path / "stock", family, **options)
    found, log = setups.run(ours)
    expected, wanted = setups.run(stock)
    text = ("language_model", "text_model", "lm_head")
    towers = [n for n in expected if not any(part in n for part in text)]
    assert towers and all(float(expected[n].norm()) > 0 for n in towers[:3])
    assert setups.apart(found, expected) < BAR
    assert log[0]["loss"] == pytest.approx(wanted[0]["loss"], abs=1e-5)
    plan = ours.sharing.last_plan
    assert plan.media and plan.computed_tokens < 0.8 * plan.logical_tokens
    # A group of four, or a pair, has one image.
    if family.startswith("qwen"):
        assert len(plan.media) <= plan.rollouts // 2


@pytest.mark.parametrize("family", slow_besides(["qwen3_vl"], MULTIMODAL))
def test_text_of_a_multimodal_model(family: str, tmp_path: Path) -> None:
    """The encoder does not run, and has no gradients."""

    def text(cls: type, name: str) -> Any:
        options: dict[str, Any] = {"generation_kwargs": {"bad_words_ids": [[61], [62], [63]]}}
        if family == "llama4":  # transformers has no load-balancing loss for it
            options["router_aux_loss_coef"] = 0.0
        made = {"model": model(family)}
        return setups.trainer("grpo", cls, tmp_path / name, made=made, **options)

    ours, stock = text(shared_trainer(GRPOTrainer), "ours"), text(WithTruth, "stock")
    if family in FAIL_IN_TRL:
        with pytest.raises(AttributeError, match=FAIL_IN_TRL[family]):
            setups.run(text(GRPOTrainer, "failing"))
        dense_head(stock.model, stock.temperature)
    found, (expected, exact) = setups.run(ours)[0], run_with_truth(stock)
    assert setups.apart(found, expected) < (2e-4 if family in ROUNDS_MORE else BAR)
    assert setups.apart(found, exact) < 4 * setups.apart(expected, exact)
    assert not any("vision" in n or "visual" in n or "projector" in n for n in found)


class InResults(GRPOTrainer):
    """Has all of a prompt but its first word in the completion, as a tool's result."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        moved = found["prompt_ids"][:, 1:]
        for name in ("ids", "mask"):
            prompt = found[f"prompt_{name}"]
            found[f"completion_{name}"] = torch.cat([prompt[:, 1:], found[f"completion_{name}"]], 1)
            found[f"prompt_{name}"] = prompt[:, :1]
        found["tool_mask"] = torch.ones_like(found["completion_ids"])
        found["tool_mask"][:, : moved.shape[1]] = 0
        return found


def test_images_in_results_of_tools(tmp_path: Path) -> None:
    given = {"sizes": 1, "loss_type": "dapo"}
    ours = trainer(shared_trainer(InResults), tmp_path / "ours", "qwen3_vl", **given)
    stock = trainer(InResults, tmp_path / "stock", "qwen3_vl", **given)
    assert setups.apart(setups.run(ours)[0], setups.run(stock)[0]) < BAR
    assert ours.sharing.last_plan.media


class Cut(GRPOTrainer):
    """Drops images as TRL does where max_completion_length cuts one in a tool's result."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        for name in ("pixel_values", "image_grid_thw", "num_images"):
            del found[name]
        found["mm_token_type_ids"].zero_()
        return found


def test_tokens_of_dropped_images_are_text(tmp_path: Path) -> None:
    ours = trainer(shared_trainer(Cut), tmp_path / "ours", "qwen2_5_vl")
    stock = trainer(Cut, tmp_path / "stock", "qwen2_5_vl")
    (found, log), (expected, wanted) = setups.run(ours), setups.run(stock)
    assert setups.apart(found, expected) < BAR
    assert log[0]["loss"] == pytest.approx(wanted[0]["loss"], abs=1e-5)
    assert not ours.sharing.last_plan.media
