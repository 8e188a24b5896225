from flashinfer.jit.core import JitSpec

SPECS: list[JitSpec] = []  # all that were asked for


def gen_batch_prefill_module(backend: str, *variant: object) -> JitSpec:
    assert len(variant) == 10
    SPECS.append(JitSpec(f"{backend} head size {variant[4]}, windows {variant[7]}"))
    return SPECS[-1]
