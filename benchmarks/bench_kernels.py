"""Exploration of kernel variants on one GPU."""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from random import randint, seed

import torch

BF16 = torch.bfloat16
T0 = time.time()
READ_CEILING = 4400.0


def log(*a):
    print(f"[{time.time() - T0:6.1f}]", *a, flush=True)


# ---------------------------------------------------------------- compile only
class Collect:
    """Compile-only mode: CPU tensors, kernels are compiled into Triton's cache, never launched."""


def compile_mode():
    import minisgl_worker.kernels.launch as launch

    launch.use_pdl = lambda x: PDL[0]
    launch.num_multiprocessors = lambda d: 132
    from triton.runtime.jit import JITFunction

    def getitem(self, grid):
        return lambda *a, **k: self.warmup(*a, grid=grid, **k)

    JITFunction.__getitem__ = getitem


PDL = [True]
DEV = "cuda"


def compile_one(job):
    name, index = job
    torch.set_num_threads(1)
    try:
        fn = COMPILE[name][index]
        fn()
        return None
    except Exception as e:
        return f"{name}[{index}]: {type(e).__name__} {str(e)[:300]}"


# ---------------------------------------------------------------- timing
def graph_time(calls, replays=4, warm=True):
    """Microseconds per call of `calls` (list of functions), captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        if warm:
            calls[0]()
        stream.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=stream):
            for c in calls:
                c()
        g.replay()
        ev = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        ev[0].record()
        for i in range(replays):
            g.replay()
            ev[i + 1].record()
        stream.synchronize()
    times = sorted(ev[i].elapsed_time(ev[i + 1]) for i in range(replays))
    return times[len(times) // 2] * 1e3 / len(calls)


def headline(step):
    seed(0)
    prompts = [len([randint(0, 10000) for _ in range(randint(100, 1024))]) for _ in range(256)]
    outs = [randint(100, 1024) for _ in range(256)]
    return [p + step for p, o in zip(prompts, outs) if o >= step]


SCENARIOS = {
    "s1": lambda: headline(1),
    "s250": lambda: headline(250),
    "s500": lambda: headline(500),
    "s900": lambda: headline(900),
    "s1020": lambda: headline(1020),
    "b1_1k": lambda: [1024],
    "long": lambda: [32768] + [300 + 2 * i for i in range(255)],
    "short": lambda: [16 + i % 40 for i in range(256)],
}
DECODE = [
    # tile, warps, stages
    (64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 3), (32, 4, 4), (64, 8, 3), (32, 2, 4), (64, 2, 3),
]
PROGRAMS = (1, 2, 3, 4, 6)
SAMPLE = list(itertools.product(((256, 1), (512, 1), (512, 2), (1024, 2), (1024, 4), (2048, 4)), (1024, 2048, 4096)))
SAMPLE = [(*a, b) for a, b in SAMPLE]


def decode_config(c, programs=2, tma=False, min_units=4):
    from minisgl_worker.kernels import decode_attention_triton as dt

    return dt.DecodeConfig(*c, programs_per_sm=programs, tma=tma, unit_tokens=64 if tma else 32, min_units=min_units)


def make_cache(pages, page_size, layout, device):
    shape = (pages, page_size, 8, 128) if layout == "nhd" else (pages, 8, page_size, 128)
    t = torch.empty(shape, dtype=BF16, device=device)
    if device != "cpu":
        t.normal_()
    return t if layout == "nhd" else t.transpose(1, 2)


def compile_decode(heads, c, page, layout, tma, window=None):
    def go():
        compile_mode()
        from minisgl_worker.kernels import decode_attention_triton as dt

        k = make_cache(16, page, layout, "cpu")
        plan = dt.DecodePlan(256, heads, 8, 128, torch.device("cpu"), decode_config(c, 2, tma), window)
        sl = torch.zeros(256, dtype=torch.int32)
        for n in (256, 214, 143, 36, 3, 1):
            plan.build(sl[:n], n)
        dt.decode_attention(torch.empty(256, heads, 128, dtype=BF16), k, k, torch.empty(256, 2048, dtype=torch.int32), sl, 0.0884, plan)

    return go


GEMM = [
    # bm, bn, bk, warps, stages, swap
    (16, 64, 128, 4, 4, True), (16, 128, 128, 4, 4, True), (16, 64, 256, 4, 3, True), (32, 128, 128, 4, 3, True),
    (64, 64, 128, 4, 4, False), (64, 128, 64, 4, 5, False), (64, 128, 128, 4, 3, False), (64, 256, 64, 4, 4, False), (64, 256, 64, 8, 4, False),
    (64, 128, 128, 4, 3, True),
    (128, 64, 128, 4, 3, False), (128, 128, 64, 4, 4, False), (128, 128, 64, 8, 4, False), (128, 128, 128, 8, 3, False), (128, 256, 64, 8, 4, False),
    (256, 128, 64, 8, 4, False),
]
SHAPES = {
    "0.6B": {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)},
    "14B": {"qkv": (7168, 5120), "o": (5120, 5120), "gate_up": (34816, 5120), "down": (5120, 17408)},
}
GEMVS = [(1, 1024, 1), (1, 1024, 2), (2, 1024, 2), (2, 1024, 4), (4, 1024, 4), (4, 2048, 4), (8, 1024, 4), (8, 1024, 8), (2, 4096, 4), (4, 512, 4), (8, 512, 4), (4, 4096, 8)]


def gemm_config(c, split, tma):
    from minisgl_worker.kernels import linear_triton as lt

    bm, bn, bk, w, s, swap = c
    return lt.MatmulConfig(bm, bn, bk, split, w, s, swap, tma)


def compile_gemm(c, tma):
    def go():
        compile_mode()
        from minisgl_worker.kernels import linear_triton as lt

        p = torch.empty(16, dtype=torch.float32)
        n = torch.empty(16, dtype=torch.int32)
        w = torch.empty(1024, 1024, dtype=BF16)
        for m in (1, 4, 16, 64, 128, 256):
            if not fits(c, m):
                continue
            for split in (1, 2):
                lt.matmul(torch.empty(m, 1024, dtype=BF16), w, None, gemm_config(c, split, tma), p, n)

    return go


def fits(c, m):
    bm = c[0]
    return {1: (16,), 4: (16,), 16: (16, 32, 64), 64: (64, 128), 128: (64, 128), 192: (64, 128, 256), 256: (128, 256)}[m].__contains__(bm)


def gemv_call(kind, x, res, nw, w, cfg):
    from minisgl_worker.kernels import linear_triton as lt

    if kind == "plain":
        return lt.gemv(x, w, None, cfg)
    if kind == "norm":
        return lt.norm_gemv(x, res, nw, 1e-6, w, None, cfg)
    return lt.silu_mul_gemv(x, w, None, cfg)


GEMV_KIND = {"qkv": "norm", "o": "plain", "gate_up": "norm", "down": "silu"}


def compile_gemv(model, name, g):
    def go():
        compile_mode()
        from minisgl_worker.kernels import linear_triton as lt

        n, k = SHAPES[model][name]
        kind = GEMV_KIND[name]
        x = torch.empty(1, k * (2 if kind == "silu" else 1), dtype=BF16)
        gemv_call(kind, x, torch.empty(1, k, dtype=BF16), torch.empty(k, dtype=BF16), torch.empty(16, k, dtype=BF16), lt.GemvConfig(*g))

    return go


def build_compile_list():
    jobs = {"decode": [], "gemm": [], "gemv": []}
    for heads in (16, 40):
        for c in DECODE:
            jobs["decode"].append(compile_decode(heads, c, 16, "nhd", False))
        for c in ((64, 4, 3), (64, 4, 4), (128, 4, 2), (32, 4, 4)):
            for layout in ("nhd", "hnd"):
                jobs["decode"].append(compile_decode(heads, c, 64, layout, False))
        for c in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3)):
            for layout in ("nhd", "hnd"):
                jobs["decode"].append(compile_decode(heads, c, 64, layout, True))
    jobs["decode"].append(compile_decode(16, (64, 4, 3), 16, "nhd", False, 128))
    for c in GEMM:
        for tma in (False, True):
            jobs["gemm"].append(compile_gemm(c, tma))
    for model in SHAPES:
        for name in SHAPES[model]:
            for g in GEMVS:
                jobs["gemv"].append(compile_gemv(model, name, g))
    return jobs


COMPILE = build_compile_list()


def compile_all(names):
    jobs = [(n, i) for n in names for i in range(len(COMPILE[n]))]
    with multiprocessing.get_context("spawn").Pool(min(15, os.cpu_count())) as pool:
        bad = [r for r in pool.imap_unordered(compile_one, jobs) if r]
    log(f"compiled {len(jobs)} jobs, {len(bad)} failed")
    for b in bad[:8]:
        log(b)


# ---------------------------------------------------------------- decode attention
def check_decode(out_rows):
    from minisgl_worker.kernels import decode_attention_triton as dt
    from minisgl_worker.kernels.decode_attention import decode_attention_reference as ref

    torch.manual_seed(1)
    lens = [1, 15, 17, 31, 33, 64, 65, 128, 129, 1000, 4000] + [200 + 7 * i for i in range(5)]
    b = len(lens)
    worst = {}
    for heads, page, layout in ((16, 16, "nhd"), (40, 16, "nhd"), (16, 64, "hnd"), (40, 64, "nhd")):
        n = -(-max(lens) // page)
        pages = b * n + 1
        k, v = (make_cache(pages, page, layout, DEV) for _ in range(2))
        table = torch.randperm(pages, device=DEV)[: b * n].view(b, n).int()
        q = torch.randn(b, heads, 128, dtype=BF16, device=DEV)
        sl = torch.tensor(lens, dtype=torch.int32, device=DEV)
        used = torch.zeros(pages, page, dtype=torch.bool, device=DEV)
        for i, length in enumerate(lens):
            pos = torch.arange(length, device=DEV)
            used[table[i, pos // page].long(), pos % page] = True
        k[~used] = float("nan")
        v[~used] = float("nan")
        want = {w: ref(q, k, v, table, sl, 0.0884, window=w).float() for w in (None, 128)}
        options = [(c, False) for c in DECODE] if (page, layout) == (16, "nhd") else []
        if page == 64:
            options += [(c, False) for c in ((64, 4, 3), (64, 4, 4), (128, 4, 2), (32, 4, 4))]
            options += [(c, True) for c in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3))]
        for c, tma in options:
            for window in (None, 128) if (c, page, heads, layout) == ((64, 4, 3), 16, 16, "nhd") else (None,):
                for programs in (3,):
                    plan = dt.DecodePlan(64, heads, 8, 128, torch.device(DEV), decode_config(c, programs, tma), window)
                    for _ in range(2):
                        plan.build(sl, b)
                        got = dt.decode_attention(q, k, v, table, sl, 0.0884, plan).float()
                    err = ((got - want[window]).norm() / want[window].norm()).item()
                    worst[(heads, page, layout, c, tma, window)] = max(worst.get((heads, page, layout, c, tma, window), 0), err if err == err else 9.0)
    bad = {str(k): v for k, v in worst.items() if not v < 8e-3}
    log(f"decode check: {len(worst)} variants, worst {max(worst.values()):.2e}, bad {bad}")
    out_rows["decode_check"] = {str(k): v for k, v in worst.items()}
    return {k for k, v in worst.items() if not v < 8e-3}


def time_decode(results, deadline, quick=False):
    from minisgl_worker.kernels import decode_attention_triton as dt

    num_caches, tokens = 6, 190_000
    for page, layout in ((16, "nhd"), (64, "nhd"), (64, "hnd")):
        pages = tokens // page
        caches = [(make_cache(pages, page, layout, DEV), make_cache(pages, page, layout, DEV)) for _ in range(num_caches)]
        for heads, (name, lens_fn) in itertools.product((16, 40), SCENARIOS.items()):
            if time.time() - T0 > deadline:
                log("decode: out of time")
                return
            lens = lens_fn()
            b = len(lens)
            n = max(64, -(-max(lens) // page))
            calls_n = 12 if b > 100 else 24
            tables = []
            for _ in range(calls_n if b < 100 else 2):
                perm = torch.randperm(pages, device=DEV).int()
                table = torch.zeros(b, n, dtype=torch.int32, device=DEV)
                at = 0
                for i, length in enumerate(lens):
                    m = -(-length // page)
                    table[i, :m] = perm[at : at + m]
                    at += m
                tables.append(table)
            sl = torch.tensor(lens, dtype=torch.int32, device=DEV)
            q = torch.randn(b, heads, 128, dtype=BF16, device=DEV)
            kv_bytes = sum(lens) * 8 * 128 * 2 * 2
            options = [(c, False) for c in DECODE] if page == 16 else [(c, False) for c in ((64, 4, 3), (64, 4, 4), (128, 4, 2), (32, 4, 4))]
            if page == 64:
                options += [(c, True) for c in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 2, 3))]
            rows = []
            for (c, tma), programs in itertools.product(options, PROGRAMS):
                for min_units in (1, 2, 4) if b <= 3 and programs in (2, 4) and not tma else (4,):
                    plan = dt.DecodePlan(256, heads, 8, 128, torch.device(DEV), decode_config(c, programs, tma, min_units))
                    plan.build(sl, b)
                    calls = [
                        lambda i=i: dt.decode_attention(q, *caches[i % num_caches], tables[i % len(tables)], sl, 0.0884, plan)
                        for i in range(calls_n)
                    ]
                    try:
                        us = graph_time(calls)
                    except Exception as e:
                        log("decode fail", c, tma, programs, type(e).__name__, str(e)[:100])
                        continue
                    rows.append((us, kv_bytes / us / 1e3, c, programs, tma, min_units))
            rows.sort()
            key = f"{page}{layout} h{heads} {name} B={b}"
            results[key] = rows
            log(key, " | ".join(f"{r[0]:.1f}us {r[1]:.0f} {r[2]}x{r[3]}{'T' if r[4] else ''}u{r[5]}" for r in rows[:4]))
        del caches
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- linear
def time_linear(results, deadline):
    from minisgl_worker.kernels import linear_triton as lt

    counters = torch.zeros(1 << 16, dtype=torch.int32, device=DEV)
    parts = torch.empty(8 * 256 * 34816, dtype=torch.float32, device=DEV)
    for model in ("14B", "0.6B"):
        for name, (n, k) in SHAPES[model].items():
            copies = max(2, min(24, int(300e6 / (n * k * 2)) + 1))
            ws = [torch.randn(n, k, dtype=BF16, device=DEV).mul_(0.02) for _ in range(copies)]
            ideal = n * k * 2 / 4.4e6
            kind = GEMV_KIND[name]
            x = torch.randn(1, k * (2 if kind == "silu" else 1), dtype=BF16, device=DEV)
            res, nw = torch.randn(1, k, dtype=BF16, device=DEV), torch.randn(k, dtype=BF16, device=DEV)
            xin = x[:, :k].contiguous()
            base = graph_time([lambda w=w: torch.nn.functional.linear(xin, w) for w in ws])
            rows = []
            for g in GEMVS:
                cfg = lt.GemvConfig(*g)
                try:
                    us = graph_time([lambda w=w: gemv_call(kind, x, res, nw, w, cfg) for w in ws])
                except Exception as e:
                    log("gemv fail", name, g, str(e)[:100])
                    continue
                rows.append((us, g))
            got = gemv_call(kind, x, res, nw, ws[0], lt.GemvConfig(*rows[0][1]))
            got = got[0] if isinstance(got, tuple) else got
            from minisgl_worker.kernels.activation import silu_mul_reference
            from minisgl_worker.kernels.norm import add_rms_norm_reference

            inp = {"plain": lambda: x, "norm": lambda: add_rms_norm_reference(x, res, nw, 1e-6)[0], "silu": lambda: silu_mul_reference(x)}[kind]()
            want = inp.float() @ ws[0].float().T
            err = ((got.float() - want).norm() / want.norm()).item()
            rows.sort()
            results[f"{model} {name} M=1"] = {"ideal": ideal, "cublas": base, "gemv": rows, "err": err}
            log(f"{model} {name} M=1 ideal {ideal:.1f} cublas {base:.1f} err {err:.1e}", " | ".join(f"{r[0]:.2f} {r[1]}" for r in rows[:4]))
            for m in (4, 16, 64, 128, 256):
                if time.time() - T0 > deadline:
                    log("linear: out of time")
                    return
                x2 = torch.randn(m, k, dtype=BF16, device=DEV)
                use = ws[: max(2, min(copies, 6))]
                if copies > 6 and n * k * 2 * 6 < 150e6:
                    use = ws
                base = graph_time([lambda w=w: torch.nn.functional.linear(x2, w) for w in use])
                want = x2.float() @ use[0].float().T
                rows = []
                for c, tma in itertools.product(GEMM, (False, True)):
                    if not fits(c, m):
                        continue
                    tiles = -(-n // c[1]) * -(-m // c[0])
                    for split in (1, 2, 3, 4, 6, 8):
                        if split > 1 and (tiles * split > 132 * 3 or k // c[2] // split < 2):
                            continue
                        cfg = gemm_config(c, split, tma)
                        try:
                            us = graph_time([lambda w=w: lt.matmul(x2, w, None, cfg, parts, counters) for w in use], replays=3)
                        except Exception as e:
                            log("gemm fail", name, c, tma, str(e)[:80])
                            break
                        rows.append((us, c, split, tma))
                rows.sort(key=lambda r: r[0])
                for r in rows[:3]:
                    got = lt.matmul(x2, use[0], None, gemm_config(*r[1:]), parts, counters)
                    err = ((got.float() - want).norm() / want.norm()).item()
                    if not err < 5e-3:
                        log("WRONG", name, m, r, err)
                ideal_m = max(ideal, 2 * m * n * k / 790e6)
                results[f"{model} {name} M={m}"] = {"ideal": ideal_m, "cublas": base, "rows": rows}
                log(f"{model} {name} M={m} ideal {ideal_m:.1f} cublas {base:.1f}", " | ".join(f"{r[0]:.1f} {r[1]} s{r[2]}{'T' if r[3] else ''}" for r in rows[:4]))


def gemv_rule(n, k):
    from minisgl_worker.kernels import linear_triton as lt

    if k <= 4096:
        block = 1 << (k - 1).bit_length()
        return lt.GemvConfig(8 if n > 4096 else 4, block, 8 if block > 2048 else 4)
    return lt.GemvConfig(8, 512 if k > 8192 else 1024, 4)


def time_gemv_rows(results):
    from minisgl_worker.kernels import linear_triton as lt

    for model, heads in (("0.6B", (151936, 1024)), ("14B", (151936, 5120))):
        for name, (n, k) in (*SHAPES[model].items(), ("lm_head", heads)):
            copies = max(2, min(24, int(300e6 / (n * k * 2)) + 1))
            ws = [torch.randn(n, k, dtype=BF16, device=DEV).mul_(0.02) for _ in range(copies)]
            line = []
            for m in (1, 2, 4):
                x = torch.randn(m, k, dtype=BF16, device=DEV)
                base = graph_time([lambda w=w: torch.nn.functional.linear(x, w) for w in ws])
                us = graph_time([lambda w=w: lt.gemv(x, w, None, gemv_rule(n, k)) for w in ws])
                err = ((lt.gemv(x, ws[0], None, gemv_rule(n, k)).float() - x.float() @ ws[0].float().T).norm() / (x.float() @ ws[0].float().T).norm()).item()
                line.append(f"M={m} cublas {base:.2f} gemv {us:.2f} err {err:.0e}")
            log(f"gemv rows {model} {name} ideal {n * k * 2 / 4.4e6:.1f}: " + " | ".join(line))
            results[f"gemv rows {model} {name}"] = line


# ---------------------------------------------------------------- elementwise and sampling
def time_small(results):
    import minisgl_worker.kernels.launch as launch
    from minisgl_worker.kernels import activation_triton, norm_triton, rope_append_triton, sampling, sampling_triton

    def both(name, calls, want=None):
        for pdl in (True, False):
            for m in (norm_triton, activation_triton, rope_append_triton, sampling_triton):
                m.use_pdl = lambda x, p=pdl: p
            us = graph_time(calls)
            results[f"{name} pdl={pdl}"] = us
            log(f"{name} pdl={pdl} {us:.2f} us")

    for b, hidden, heads in ((256, 1024, 16), (256, 5120, 40), (1, 1024, 16)):
        x, r = (torch.randn(b, hidden, dtype=BF16, device=DEV) for _ in range(2))
        w = torch.randn(hidden, dtype=BF16, device=DEV)
        both(f"add_rms_norm {b}x{hidden}", [lambda: norm_triton.add_rms_norm(x, r, w, 1e-6)] * 20)
        inter = 3072 if hidden == 1024 else 17408
        gu = torch.randn(b, 2 * inter, dtype=BF16, device=DEV)
        both(f"silu_mul {b}x{inter}", [lambda: activation_triton.silu_mul(gu)] * 20)
        qkv = torch.randn(b, (heads + 16) * 128, dtype=BF16, device=DEV)
        k, v = make_cache(1000, 16, "nhd", DEV), make_cache(1000, 16, "nhd", DEV)
        hw = torch.randn(128, dtype=BF16, device=DEV)
        cs = torch.randn(4096, 128, device=DEV)
        pos = torch.randint(0, 4096, (b,), device=DEV)
        loc = torch.randperm(16000, device=DEV)[:b]
        both(f"rope_append {b}x{heads}", [lambda: rope_append_triton.qk_norm_rope_append(qkv, hw, hw, 1e-6, cs, pos, k, v, loc)] * 20)
    from minisgl_worker.kernels import decode_attention_triton as dt, prefill_attention_triton as pf
    from minisgl_worker.kernels.prefill_attention import prefill_attention_reference

    plan = dt.DecodePlan(256, 16, 8, 128, torch.device(DEV), decode_config((64, 4, 3), 2))
    sl = torch.randint(100, 2000, (256,), dtype=torch.int32, device=DEV)
    log(f"plan build {graph_time([lambda: plan.build(sl, 256)] * 20):.2f} us")
    for heads in (16, 40):
        n, length = 32, 512
        k, v = make_cache(n * 32, 16, "nhd", DEV), make_cache(n * 32, 16, "nhd", DEV)
        table = torch.randperm(n * 32, device=DEV).int().view(n, 32)
        q = torch.randn(n * length, heads, 128, dtype=BF16, device=DEV)
        out = torch.empty_like(q)
        for tq in (64, 128):
            tiles = pf.plan_prefill([(i * length, length, 0) for i in range(n)], tq).to(DEV)
            us = graph_time([lambda: pf.prefill_attention(q, k, v, table, tiles, 0.0884, out, None, tq)] * 4)
            want = prefill_attention_reference(q[:length], k, v, table[0], 0, 0.0884)
            err = ((out[:length].float() - want.float()).norm() / want.float().norm()).item()
            log(f"prefill 32x512 h{heads} tile {tq}: {us:.0f} us err {err:.1e}")
            results[f"prefill {heads} {tq}"] = us
    for rows_n, dtype in ((256, BF16), (128, BF16), (36, BF16), (1, BF16)):
        for scale in (1.0, 4.0):
            logits = [torch.randn(rows_n, 151936, dtype=dtype, device=DEV) * scale for _ in range(3)]
            t = torch.full((rows_n,), 0.6, device=DEV)
            s = torch.randint(-(2**62), 2**62, (rows_n,), device=DEV)
            p = torch.arange(rows_n, device=DEV)
            best = []
            z = torch.zeros_like(t)
            sampling_triton.use_pdl = lambda x: True
            for tile, warps, target in SAMPLE:
                sampling_triton.TILE, sampling_triton.NUM_WARPS, sampling_triton.TARGET_PROGRAMS = tile, warps, target
                us = graph_time([lambda lg=lg: sampling_triton.sample(lg, t, s, p, 0) for lg in logits * 3])
                greedy = graph_time([lambda lg=lg: sampling_triton.sample(lg, z, s, p, 0) for lg in logits * 3])
                best.append((round(us, 1), round(greedy, 1), tile, warps, target))
            best.sort()
            sampling_triton.TILE, sampling_triton.NUM_WARPS, sampling_triton.TARGET_PROGRAMS = best[0][2:]
            got = sampling_triton.sample(logits[0], t, s, p, 0)
            want = sampling.sample_reference(logits[0], t, s, p)
            wrong = int((got.tokens != want.tokens).sum())
            cpu = sampling.sample_reference(logits[0][:4].cpu(), t[:4].cpu(), s[:4].cpu(), p[:4].cpu())
            wrong_cpu = int((got.tokens[:4].cpu() != cpu.tokens).sum())
            greedy = sampling_triton.sample(logits[0], z, s, p, 0)
            wrong_greedy = int((greedy.tokens != logits[0].argmax(-1)).sum())
            log(f"sample {rows_n} scale {scale}: {best[:5]} wrong {wrong} cpu {wrong_cpu} greedy {wrong_greedy}; argmax {graph_time([lambda lg=lg: lg.argmax(-1) for lg in logits]):.1f}")
            results[f"sample {rows_n} {scale}"] = (best, wrong, wrong_cpu)


def check_small():
    from minisgl_worker.kernels import activation, activation_triton, norm, norm_triton, rope_append, rope_append_triton

    def err(a, b):
        return ((a.float() - b.float()).norm() / b.float().norm()).item()

    x, r = (torch.randn(37, 5120, dtype=BF16, device=DEV) for _ in range(2))
    w = torch.randn(5120, dtype=BF16, device=DEV)
    a, b = norm_triton.add_rms_norm(x, r, w, 1e-6), norm.add_rms_norm_reference(x, r, w, 1e-6)
    log("norm err", err(a[0], b[0]), err(a[1], b[1]))
    g = torch.randn(37, 2 * 3072, dtype=BF16, device=DEV)
    log("silu err", err(activation_triton.silu_mul(g), activation.silu_mul_reference(g)))
    caches = [make_cache(100, 16, "nhd", DEV) for _ in range(4)]
    qkv = torch.randn(37, 56 * 128, dtype=BF16, device=DEV)
    hw = torch.randn(128, dtype=BF16, device=DEV)
    cs = torch.randn(4096, 128, device=DEV)
    pos, loc = torch.randint(0, 4096, (37,), device=DEV), torch.randperm(1600, device=DEV)[:37]
    caches[2].copy_(caches[0])
    caches[3].copy_(caches[1])
    q1 = rope_append_triton.qk_norm_rope_append(qkv, hw, hw, 1e-6, cs, pos, caches[0], caches[1], loc)
    q2 = rope_append.qk_norm_rope_append_reference(qkv, hw, hw, 1e-6, cs, pos, caches[2], caches[3], loc)
    log("rope err", err(q1, q2), err(caches[0], caches[2]), err(caches[1], caches[3]))


def chain(results):
    """One layer of Qwen3-0.6B for one request, all weights cold: fused kernels against cuBLAS and separate kernels."""
    import torch.nn.functional as F

    from minisgl_worker.kernels import activation_triton, decode_attention_triton as dt, linear_triton as lt, norm_triton, rope_append_triton

    L = 12
    W = [{n: torch.randn(s, dtype=BF16, device=DEV).mul_(0.02) for n, s in SHAPES["0.6B"].items()} for _ in range(L)]
    nw = torch.ones(1024, dtype=BF16, device=DEV)
    hw = torch.ones(128, dtype=BF16, device=DEV)
    cs = torch.randn(4096, 128, device=DEV)
    pos, loc = torch.tensor([1023], device=DEV), torch.tensor([1023], device=DEV)
    caches = [(make_cache(64, 16, "nhd", DEV), make_cache(64, 16, "nhd", DEV)) for _ in range(L)]
    table = torch.arange(64, device=DEV, dtype=torch.int32).view(1, 64)
    sl = torch.tensor([1024], dtype=torch.int32, device=DEV)
    x0 = torch.randn(1, 1024, dtype=BF16, device=DEV)
    cfg = {n: gemv_rule(*shape) for n, shape in SHAPES["0.6B"].items()}
    best = results.get("16nhd h16 b1_1k B=1")
    attention = decode_config(best[0][2], best[0][3], False, best[0][5]) if best else decode_config((64, 4, 3), 2)
    mods = (norm_triton, activation_triton, rope_append_triton, dt, lt)
    for pdl in (True, False):
        for m in mods:
            m.use_pdl = lambda x, p=pdl: p
        plan = dt.DecodePlan(256, 16, 8, 128, torch.device(DEV), attention)
        plan.build(sl, 1)

        def fused():
            x, res = x0, x0
            for i in range(L):
                qkv, res = lt.norm_gemv(x, res, nw, 1e-6, W[i]["qkv"], None, cfg["qkv"])
                q = rope_append_triton.qk_norm_rope_append(qkv, hw, hw, 1e-6, cs, pos, *caches[i], loc)
                a = dt.decode_attention(q, *caches[i], table, sl, 0.0884, plan)
                o = lt.gemv(a.view(1, -1), W[i]["o"], None, cfg["o"])
                gu, res = lt.norm_gemv(o, res, nw, 1e-6, W[i]["gate_up"], None, cfg["gate_up"])
                x = lt.silu_mul_gemv(gu, W[i]["down"], None, cfg["down"])
            return x

        def separate(lin):
            x, res = x0, x0
            for i in range(L):
                h, res = norm_triton.add_rms_norm(x, res, nw, 1e-6)
                q = rope_append_triton.qk_norm_rope_append(lin(h, W[i]["qkv"], "qkv"), hw, hw, 1e-6, cs, pos, *caches[i], loc)
                a = dt.decode_attention(q, *caches[i], table, sl, 0.0884, plan)
                h, res = norm_triton.add_rms_norm(lin(a.view(1, -1), W[i]["o"], "o"), res, nw, 1e-6)
                x = lin(activation_triton.silu_mul(lin(h, W[i]["gate_up"], "gate_up")), W[i]["down"], "down")
            return x

        def without(drop):
            x, res = x0, x0
            for i in range(L):
                qkv, res = lt.norm_gemv(x, res, nw, 1e-6, W[i]["qkv"], None, cfg["qkv"])
                q = qkv[:, :2048].view(1, 16, 128)
                if drop != "rope":
                    q = rope_append_triton.qk_norm_rope_append(qkv, hw, hw, 1e-6, cs, pos, *caches[i], loc)
                a = q if drop == "attention" else dt.decode_attention(q, *caches[i], table, sl, 0.0884, plan)
                o = lt.gemv(a.view(1, -1), W[i]["o"], None, cfg["o"])
                gu, res = lt.norm_gemv(o, res, nw, 1e-6, W[i]["gate_up"], None, cfg["gate_up"])
                x = lt.silu_mul_gemv(gu, W[i]["down"], None, cfg["down"])
            return x

        for label, f in (("fused", fused), ("no attention", lambda: without("attention")), ("no rope", lambda: without("rope")), ("gemv separate", lambda: separate(lambda h, w, n: lt.gemv(h, w, None, cfg[n]))), ("cublas", lambda: separate(lambda h, w, n: F.linear(h, w)))):
            us = graph_time([f], replays=8) / L
            results[f"chain {label} pdl={pdl}"] = us
            log(f"chain 0.6B B=1 {label} pdl={pdl}: {us:.2f} us/layer")
        a, b = fused(), separate(lambda h, w, n: F.linear(h, w))
        log("chain agreement", ((a.float() - b.float()).norm() / b.float().norm()).item())
        for m in mods:
            m.use_pdl = lambda x: True


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default=os.environ.get("OUT", "."))
    ap.add_argument("--sections", default="decode,linear,small,chain")
    ap.add_argument("--deadline", type=float, default=120)
    args = ap.parse_args()
    sections = args.sections.split(",")
    names = [n for n, s in (("decode", "decode"), ("gemm", "linear"), ("gemv", "linear")) if s in sections]
    compile_all(names)
    results = {}
    torch.cuda.init()
    log(torch.cuda.get_device_name(), torch.__version__)
    try:
        if "decode" in sections:
            check_decode(results)
            time_decode(results, args.deadline * 0.55)
        if "linear" in sections:
            time_linear(results, args.deadline)
        if "rows" in sections:
            time_gemv_rows(results)
        if "chain" in sections:
            chain(results)
        if "small" in sections:
            check_small()
            time_small(results)
    finally:
        with open(os.path.join(args.out, "kernels.json"), "w") as f:
            json.dump(results, f, default=str)
    log("done")


if __name__ == "__main__":
    main()
