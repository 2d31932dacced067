"""Tiny random models that see images, with their processors' files, and images for them."""

import io
import json

SPECIAL = {
    "patches": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "tiles": [
        *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
    ],
    "rows": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "fixed": ["<start_of_image>", "<image_soft_token>", "<end_of_image>"],
    "pooled": ["<|image>", "<|image|>", "<image|>"],
    "crops": ["<img>", "<IMG_CONTEXT>", "</img>"],
}
MARKERS = {
    "patches": "<|vision_start|><|image_pad|><|vision_end|>",
    "tiles": "<image>",
    "rows": "[IMG]",
    "fixed": "<start_of_image>",
    "pooled": "<|image|>",
    "crops": "<IMG_CONTEXT>",
}
QWEN3_5 = ("qwen3_5", "qwen3_5_moe")
KINDS = {
    **dict.fromkeys((*("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), *QWEN3_5), "patches"),
    **dict.fromkeys(("idefics3", "smolvlm"), "tiles"),
    "mistral3": "rows",
    "gemma3": "fixed",
    "gemma4": "pooled",
    "internvl": "crops",
}
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] -%}
{% if c['type'] == 'image' %}MARKER{% else %}{{ c['text'] }}{% endif %}{% endfor %}{% endif -%}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make_tokenizer(kind, tokenizer=None):
    import tiny

    tokenizer = tokenizer or tiny.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL[kind]})
    names = ("boi_token", "image_token", "eoi_token")
    if kind == "crops":
        names = ("start_image_token", "context_image_token", "end_image_token")
    if kind in ("fixed", "pooled", "crops"):
        named = dict(zip(names, SPECIAL[kind], strict=True))
        if kind == "pooled":  # 5.17's processor has no pictures without
            named |= dict.fromkeys(("audio_token", "boa_token", "eoa_token"), named["boi_token"])
        tokenizer._set_model_specific_special_tokens(named)
    tokenizer.chat_template = TEMPLATE.replace("MARKER", MARKERS[kind])
    return tokenizer


def make_image_processor(model_type):
    """Of transformers, as it is without torchvision; with small images."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    kind = KINDS[model_type]
    if kind == "patches":
        size = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
        return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=size)
    if kind == "fixed":
        return Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    if kind == "pooled":
        return Gemma4ImageProcessorPil(patch_size=2, pooling_kernel_size=2, max_soft_tokens=70)
    if kind == "crops":
        size = {"height": 16, "width": 16}
        return GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=6)
    if kind == "rows":
        size, patch = {"longest_edge": 32}, {"height": 4, "width": 4}
        return PixtralImageProcessorPil(size=size, patch_size=patch)
    make = SmolVLMImageProcessorPil if model_type == "smolvlm" else Idefics3ImageProcessorPil
    return make(size={"longest_edge": 32}, max_image_size={"longest_edge": 16})


def make_config(model_type, tokenizer):
    from transformers import AutoConfig

    def token(word):
        return tokenizer.convert_tokens_to_ids(word)

    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    kind = KINDS[model_type]
    if kind == "patches":
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        vision = {"depth": 2, "patch_size": 4, "num_heads": 2}
        if model_type == "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        else:
            vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        if model_type == "qwen2_5_vl":
            vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        if model_type == "qwen3_vl":
            rope["mrope_interleaved"] = True
            text["head_dim"] = 16
            vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        if model_type in QWEN3_5:
            rope |= {"mrope_interleaved": True, "partial_rotary_factor": 0.5}
            rope["mrope_section"] = [2, 1, 1]
            heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
            sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
            layers = ["linear_attention", "full_attention", "linear_attention"]
            text |= {"head_dim": 16, "layer_types": layers, **heads, **sizes}
            vision |= {"num_position_embeddings": 64}
        if model_type == "qwen3_5_moe":
            text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            text |= {"shared_expert_intermediate_size": 32}
        ids = {"image": "image_pad", "video": "video_pad"}
        ids |= {"vision_start": "vision_start", "vision_end": "vision_end"}
        return AutoConfig.for_model(
            model_type,
            text_config={**text, "rope_parameters": rope},
            vision_config=vision,
            **{f"{name}_token_id": token(f"<|{word}|>") for name, word in ids.items()},
        )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    if kind == "tiles":
        return AutoConfig.for_model(
            model_type,
            text_config={**text, "model_type": "llama"},
            vision_config=vision,
            image_token_id=token("<image>"),
            scale_factor=2,
            pad_token_id=tokenizer.pad_token_id,
        )
    if kind == "fixed":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        own = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8}
        return AutoConfig.for_model(
            model_type,
            text_config={**text, **own, "layer_types": layers},
            vision_config=vision,
            mm_tokens_per_image=4,
            boi_token_index=token("<start_of_image>"),
            eoi_token_index=token("<end_of_image>"),
            image_token_index=token("<image_soft_token>"),
        )
    if kind == "pooled":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        own = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "layer_types": layers}
        own |= {"vocab_size_per_layer_input": len(tokenizer), "hidden_size_per_layer_input": 8}
        sizes = {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 2}
        return AutoConfig.for_model(
            model_type,
            text_config={**text, **own, "use_bidirectional_attention": "vision"},
            vision_config={**vision, **sizes, "pooling_kernel_size": 2},
            audio_config=None,
            boi_token_id=token("<|image>"),
            eoi_token_id=token("<image|>"),
            image_token_id=token("<|image|>"),
            video_token_id=len(tokenizer),
            audio_token_id=len(tokenizer) + 1,
        )
    if kind == "crops":
        return AutoConfig.for_model(
            model_type,
            text_config={**text, "model_type": "qwen2"},
            vision_config=vision,
            image_token_id=token("<IMG_CONTEXT>"),
            image_seq_length=4,
        )
    return AutoConfig.for_model(
        model_type,
        text_config={**text, "model_type": "mistral", "sliding_window": None},
        vision_config={**vision, "model_type": "pixtral", "head_dim": 16, "image_size": 32},
        image_token_index=token("[IMG]"),
        vision_feature_layer=-1,
        spatial_merge_size=2,
    )


def make_model_directory(model_type, directory, *, seed=0, tokenizer=None, change=None):
    """Weights that are no zeros anywhere, so that what is wrong shows."""
    import torch
    from transformers import AutoModelForImageTextToText

    kind = KINDS[model_type]
    tokenizer = make_tokenizer(kind, tokenizer)
    torch.manual_seed(seed)
    config = make_config(model_type, tokenizer)
    if change is not None:
        change(config)
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter.data, std=0.15)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
        if kind == "pooled" and "q_norm" in name:  # what scales the scores, and nothing else does
            parameter.data.mul_(0.25)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    make_image_processor(model_type).save_pretrained(directory)
    more = {
        "fixed": {"image_seq_length": 4},
        "tiles": {"image_seq_len": 4},
        "rows": {"patch_size": 4, "spatial_merge_size": 2},
        "crops": {"image_seq_length": 4},
    }
    settings = {"processor_class": PROCESSORS[model_type], **more.get(kind, {})}
    (directory / "processor_config.json").write_text(json.dumps(settings))
    return directory


PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    **dict.fromkeys(QWEN3_5, "Qwen3VLProcessor"),
    "idefics3": "Idefics3Processor",
    "smolvlm": "SmolVLMProcessor",
    "mistral3": "PixtralProcessor",
    "gemma3": "Gemma3Processor",
    "gemma4": "Gemma4Processor",
    "internvl": "InternVLProcessor",
}


def expanded_by_transformers(vision, text, images):
    """A rendering as the model's processor expands it, by its own code."""
    kind = KINDS[vision.config.model_type]
    if kind in ("tiles", "fixed"):
        from transformers import Gemma3Processor, Idefics3Processor

        if kind == "tiles":
            made = Idefics3Processor(vision.images, vision.tokenizer, image_seq_len=4)
        else:
            made = Gemma3Processor(vision.images, vision.tokenizer, image_seq_length=4)
        given = {"images": [images]} if images else {}
        return made(text=[text], add_special_tokens=False, **given)["input_ids"][0]
    from transformers import Gemma4Processor, InternVLProcessor, Qwen2VLProcessor

    class Half:
        image_processor, image_token, image_seq_length = vision.images, vision.marker, 4

    for name, token in vision.tokenizer.special_tokens_map.items():
        setattr(Half, name, token) if name != "image_token" else None
    makers = {"patches": Qwen2VLProcessor, "pooled": Gemma4Processor, "crops": InternVLProcessor}
    more = {}
    if kind == "crops":
        more = getattr(InternVLProcessor, "images_kwargs", None)
        if more is None:  # before 5.23
            more = InternVLProcessor.valid_processor_kwargs._defaults["images_kwargs"]
    inputs = vision.images(images=images, return_tensors="np", **more) if images else {}
    for number in range(len(images)):
        whole = makers[kind].replace_image_token(Half, inputs, number)
        text = text.replace(vision.marker, whole.replace(vision.marker, "\0"), 1)
    text = text.replace("\0", vision.marker)
    return vision.tokenizer(text, add_special_tokens=False)["input_ids"]


def make_image(height, width, *, seed=0, mode="RGB"):
    """Noise: no two of them are alike."""
    import numpy as np
    from PIL import Image

    levels = np.random.default_rng([seed, height, width]).integers(0, 255, (height, width, 3))
    return Image.fromarray(levels.astype(np.uint8)).convert(mode)


def encoded(image, kind="PNG", **settings):
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


QUESTIONS = ("What is this?", "Which is larger?\n", "Say it in one word:", "And now?")


def write_rows(folder, num_rows=12, *, seed=0):
    """A file of rows with one, two or no images each, and the images next to it."""
    import numpy as np

    draw = np.random.default_rng(seed)
    (folder / "shots").mkdir(exist_ok=True)
    lines = []
    for number in range(num_rows):
        parts, count = [], int(draw.integers(0, 3)) if number else 2
        for place in range(count):
            height, width = (int(each) for each in draw.integers(9, 60, 2))
            name = f"shots/{number}-{place}.png"
            make_image(height, width, seed=number).save(folder / name)
            parts += [{"type": "image_url", "image_url": {"url": name}}]
            parts += [{"type": "text", "text": QUESTIONS[(number + place) % 4]}]
        content = parts or f"Question {number}?"
        answer = f"It is number {number}." * int(draw.integers(1, 3))
        turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        if number % 3 == 0:
            turns += [
                {"role": "user", "content": "Sure?"},
                {"role": "assistant", "content": "Yes."},
            ]
        lines.append(json.dumps({"messages": turns}))
    file = folder / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


EVERYTHING = ["text", "projector", "vision"]


class Family:
    """A tiny model of one family with a few rows."""

    def __init__(self, model_type, folder, run=None):
        """The rows and the model of a run's folder, or new ones."""
        from trainkit.data import DataOptions, Ledger, Source, prepare
        from trainkit.models.tokenizer import load_tokenizer
        from trainkit.options import ImageOptions, ModelOptions
        from trainkit.train.images import vision_of

        folder.mkdir(exist_ok=True)
        self.model_type = model_type
        self.directory = run / model_type if run else make_model_directory(model_type, folder)
        self.source = ModelOptions(str(self.directory), dtype="float32", train=EVERYTHING)
        self.tokenizer = load_tokenizer(self.source)
        self.vision = vision_of(self.source, self.tokenizer, ImageOptions())
        options = DataOptions(cache_dir=str(folder / "cache"))
        rows = [Source(path=str(run / "rows.jsonl" if run else write_rows(folder)))]
        ledger = Ledger(folder / "dropped.jsonl")
        self.data = prepare(rows, self.tokenizer, options, ledger=ledger, vision=self.vision)
        assert self.data.num_images

    def build(self, **given):
        from lab import built

        packing = given.get("packing", True)
        kernels = packing and self.vision.config.model_type in QWEN3_5
        given = {"packing": packing, "kernels": kernels, **given}
        return built(self.source, sees_images=True, **given).model.train()

    def plain(self, directory=None):
        import torch
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText.from_pretrained(
            directory or self.directory, dtype=torch.float32
        )

    def collator(self, packing):
        from trainkit.objectives import SFT
        from trainkit.objectives.objective import RowShape

        pad = self.tokenizer.pad_token_id
        return SFT.collator(RowShape(1024, pad, packing, vision=self.vision))

    def plain_batch(self, sample):
        """What transformers' own image processor makes of a sample, with no position of ours."""
        import numpy as np
        import torch

        from trainkit.data.images import decode

        ids = torch.from_numpy(sample["input_ids"].astype(np.int64))[None]
        labels = torch.where(torch.from_numpy(sample["loss_mask"] > 0), ids, -100)
        batch = {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}
        images = [decode(image.read()) for image in sample.get("images", ())]
        if not images:
            return batch
        kind = KINDS[self.vision.config.model_type]
        if kind == "tiles":
            found = self.vision.images(images=[images], return_tensors="pt")
        elif kind == "rows":
            found = self.vision.images(images=images, return_tensors="pt", patch_size=8)
        else:
            found = self.vision.images(images=images, return_tensors="pt")
            for name in ("num_crops", "num_patches", "num_soft_tokens_per_image"):
                found.pop(name, None)
            if kind != "crops":
                name = "token_type_ids" if kind == "fixed" else "mm_token_type_ids"
                batch[name] = (ids == self.vision.token_id).int()
        return batch | dict(found)
