"""Variants of attention, and what they are called on the page."""

NAIVE, COMPILED, OURS, EAGER, CUDNN = "naive", "compiled", "flash", "eager", "sdpa_cudnn"
FA4, FA4_SAME_BITS = "flash_attn_4", "flash_attn_4_deterministic"
NAMES = {
    "unfused": "naive, softmax written out",
    COMPILED: "compiled naive",
    "sdpa_flash": "SDPA flash",
    CUDNN: "SDPA cuDNN",
    "sdpa_efficient": "SDPA efficient",
    "sdpa_math": "SDPA math",
    "flex": "FlexAttention",
    "tiled": "tiled (PyTorch)",
    "flash_compiled_backward": "ours, compiled backward",
    FA4: "FlashAttention-4",
    FA4_SAME_BITS: "FlashAttention-4, deterministic",
    OURS: "ours (Triton)",
}
