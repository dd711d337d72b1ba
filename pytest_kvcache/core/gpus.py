"""The GPU catalogue: published figures, one frozen row a card. Adding a GPU is adding a row.

Memory in GB, bandwidth in GB/s, dense BF16 TFLOP/s, board power in W. NVML names are exact: prefixes are unsafe
(L4, L40 and L40S; H200 and H200 NVL). A figure that could not be confirmed is None.
"""

from __future__ import annotations

from difflib import get_close_matches

from .spec import Gpu, UserError

# key, label, NVML names, memory, bandwidth, BF16, power, sources (public repositories)
_ROWS: tuple[tuple[str, str, tuple[str, ...], float | None, float | None, float | None, float | None, str], ...] = (
    ("a100-pcie-40gb", "A100 40GB PCIe", ("NVIDIA A100-PCIE-40GB",), 40, 1555, 312, 250, "NVIDIA/open-gpu-kernel-modules; cli99/llm-analysis; mlcommons/inference_results_v4.1"),
    ("a100-sxm-40gb", "A100 40GB SXM4", ("NVIDIA A100-SXM4-40GB",), 40, 1555, 312, 400, "NVIDIA/open-gpu-kernel-modules; cli99/llm-analysis; mlcommons/inference_results_v4.1"),
    ("a100-pcie-80gb", "A100 80GB PCIe", ("NVIDIA A100 80GB PCIe",), 80, 1935, 312, 300, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; cli99/llm-analysis"),
    ("a100-sxm-80gb", "A100 80GB SXM4", ("NVIDIA A100-SXM4-80GB",), 80, 2039, 312, 400, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; cli99/llm-analysis"),
    ("a800-sxm-80gb", "A800 80GB SXM4", ("NVIDIA A800-SXM4-80GB",), 80, 2039, 312, 400, "NVIDIA/open-gpu-kernel-modules; hahnyuan/LLM-Viewer; huggingface/huggingface.js"),
    ("a800-pcie-80gb", "A800 80GB PCIe", ("NVIDIA A800 80GB PCIe", "NVIDIA A800 80GB PCIe LC"), 80, 1935, 312, 300, "NVIDIA/open-gpu-kernel-modules; aiwiki: NVIDIA A800"),
    ("a800-sxm-40gb", "A800 40GB SXM4", ("NVIDIA A800-SXM4-40GB",), 40, 1555, 312, 400, "NVIDIA/open-gpu-kernel-modules"),
    ("a800-40gb-active", "A800 40GB Active", ("NVIDIA A800 40GB Active",), 40, 1555, 312, 250, "NVIDIA/open-gpu-kernel-modules; hmc-tech A800 40GB"),
    ("h100-pcie", "H100 80GB PCIe", ("NVIDIA H100 PCIe",), 80, 2000, 756.5, 350, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; cli99/llm-analysis"),
    ("h100-sxm", "H100 80GB SXM5", ("NVIDIA H100 80GB HBM3",), 80, 3350, 989, 700, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("h100-nvl", "H100 NVL 94GB", ("NVIDIA H100 NVL",), 94, 3900, None, 400, "NVIDIA/open-gpu-kernel-modules; mlcommons/inference_results_v4.1; stas00/ml-engineering"),
    ("h200-sxm", "H200 141GB SXM", ("NVIDIA H200",), 141, 4800, 989, 700, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("h200-nvl", "H200 NVL 141GB", ("NVIDIA H200 NVL",), 141, 4800, None, 600, "NVIDIA/open-gpu-kernel-modules; stas00/ml-engineering; saulelectric H200 (SXM 700 W / PCIe 600 W, 4.8 TB/s)"),
    ("h20", "H20 96GB", ("NVIDIA H20", "NVIDIA H20 NVL16"), 96, 4000, 148, 400, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js; Hugging Face hardware page H20"),
    ("h20-3e", "H20-3e 141GB", ("NVIDIA H20-3e",), None, None, None, None, "NVIDIA/open-gpu-kernel-modules"),
    ("h800-sxm", "H800 80GB SXM5", ("NVIDIA H800",), 80, 3350, 989, 700, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js; philisun H800 vs H100"),
    ("h800-pcie", "H800 80GB PCIe", ("NVIDIA H800 PCIe",), 80, None, None, None, "NVIDIA/open-gpu-kernel-modules; TechPowerUp news: H800"),
    ("h800-nvl", "H800 NVL", ("NVIDIA H800 NVL",), None, None, None, None, "NVIDIA/open-gpu-kernel-modules"),
    ("gh200-96gb", "GH200 96GB HBM3", ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), 96, 4000, 989, None, "NVIDIA/open-gpu-kernel-modules; stas00/ml-engineering; mlcommons/inference_results_v4.1"),
    ("gh200-144gb", "GH200 144GB HBM3e", ("NVIDIA GH200 144G HBM3e",), 141, 4800, 989, None, "NVIDIA/open-gpu-kernel-modules; stas00/ml-engineering"),
    ("l4", "L4 24GB", ("NVIDIA L4",), 24, 300, 121, 72, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; mlcommons/inference_results_v4.1"),
    ("l40", "L40 48GB", ("NVIDIA L40",), 48, 864, 181, 300, "NVIDIA/open-gpu-kernel-modules; mlcommons/inference_results_v4.1; huggingface/huggingface.js"),
    ("l40s", "L40S 48GB", ("NVIDIA L40S",), 48, 864, 362.05, 350, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; mlcommons/inference_results_v4.1"),
    ("l20", "L20 48GB", ("NVIDIA L20",), 48, None, None, 275, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js"),
    ("a10", "A10 24GB", ("NVIDIA A10",), 24, 600, 125, 150, "NVIDIA/open-gpu-kernel-modules; cli99/llm-analysis; mlcommons/inference_results_v4.1"),
    ("t4", "T4 16GB", ("Tesla T4", "NVIDIA T4 (some driver branches)"), 16, 320, None, 70, "NVIDIA/open-gpu-kernel-modules; mlcommons/inference_results_v4.1; huggingface/huggingface.js"),
    ("v100-sxm-32gb", "V100 32GB SXM2", ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-16GB"), 32, 900, None, 300, "cli99/llm-analysis; huggingface/huggingface.js; hahnyuan/LLM-Viewer"),
    ("v100-pcie-32gb", "V100 32GB PCIe", ("Tesla V100-PCIE-32GB", "Tesla V100-PCIE-16GB"), 32, 900, None, None, "cli99/llm-analysis; PCI id/name table in a public source file"),
    ("rtx-4090", "GeForce RTX 4090", ("NVIDIA GeForce RTX 4090",), 24, 1008, 165.15, 450, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js; waredb RTX 4090"),
    ("rtx-3090", "GeForce RTX 3090", ("NVIDIA GeForce RTX 3090",), 24, 936, 71, 350, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js; cuttingedgegamer RTX 3090"),
    ("rtx-5090", "GeForce RTX 5090", ("NVIDIA GeForce RTX 5090",), 32, 1792, 209.6, 575, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js; spheron RTX 5090"),
    ("b100", "B100", ("NVIDIA B100",), 192, 8000, 1750, 700, "hmc-tech B100; vllm-project/vllm"),
    ("b200", "B200 180GB SXM", ("NVIDIA B200",), 180, 7700, 2250, 1000, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("gb200", "GB200 (per GPU)", ("NVIDIA GB200",), 186, 8000, 2500, 1200, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("b300", "B300 SXM6", ("NVIDIA B300 SXM6 AC",), 288, 7750, 2250, 1100, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("gb300", "GB300 (per GPU)", ("NVIDIA GB300",), 288, 8000, 2500, 1400, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("rtx-pro-6000-blackwell-server", "RTX PRO 6000 Blackwell Server Edition", ("NVIDIA RTX PRO 6000 Blackwell Server Edition",), 96, 1792, 467.8, 600, "NVIDIA/open-gpu-kernel-modules; ai-dynamo/aiconfigurator; stas00/ml-engineering"),
    ("rtx-pro-6000-blackwell-workstation", "RTX PRO 6000 Blackwell Workstation Edition", ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition",), 96, 1792, None, 600, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js"),
    ("rtx-pro-6000-blackwell-maxq", "RTX PRO 6000 Blackwell Max-Q Workstation Edition", ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",), 96, 1792, None, 300, "NVIDIA/open-gpu-kernel-modules; huggingface/huggingface.js"),
)

GPUS: dict[str, Gpu] = {"cpu": Gpu(key="cpu", label="this machine's processors")} | {
    key: Gpu(
        key=key, label=label, nvml_names=names, memory_gb=memory, bandwidth_gb_s=bandwidth,
        bf16_tflops=bf16, tdp_w=tdp, source=source,
    )
    for key, label, names, memory, bandwidth, bf16, tdp, source in _ROWS
}  # fmt: skip

# The name people type for a family stands for its most common form.
ALIASES = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-sxm-80gb", "a100-40gb": "a100-sxm-40gb", "h800": "h800-sxm"}


def find_gpu(name: str) -> Gpu:
    """The catalogue row called `name`, or UserError with the known names."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in GPUS:
        known = sorted({*GPUS, *ALIASES})
        near = get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"--kv-gpu={name}: no such GPU in the catalogue{hint} Known: {', '.join(known)}")
    return GPUS[key]
