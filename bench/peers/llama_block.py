"""A Llama block in plain PyTorch, written so that torch.compile makes of it what it makes of a whole model.

One compiled function serves every layer: weights and cache are its arguments. A layer hands its MLP output on beside
the residual and the next layer adds the two, because in a model the compiler merges that addition into the next norm; a
block compiled alone with the addition at its end would take one kernel more than it does in a model.
"""
import torch
import torch.nn.functional as F

E4M3, E4M3_MAX = torch.float8_e4m3fn, 448.0
INT4_GROUP = 128  # the coarsest common one: fewest scale bytes for the peer
ACTIVATION_MAX = 4.0  # what static FP8 scales reach: activations behind a norm are about 1


def weight_bytes(kind, n, k):
    if kind == "int4":
        return n * k // 2 + n * k // INT4_GROUP * 4
    return n * k * 2 if kind == "bf16" else n * k + (4 * n if kind == "fp8_row" else 4)


def pack_int4(codes):
    """codes: (N, K / 2) bytes, the even column in the high nibble."""
    return torch.ops.aten._convert_weight_to_int4pack(codes, 8)


def multiply_int4(x, packed, scale_and_zero):
    return torch.ops.aten._weight_int4pack_mm(x, packed, INT4_GROUP, scale_and_zero)


def random_weight(kind, n, k, device, with_dense=False):
    """(tensors that multiply() takes, the same matrix in FP32 or None); (N, K), elements about 1 / sqrt(K)."""
    size = k ** -0.5
    if kind == "int4":
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device)
        scale = torch.rand(k // INT4_GROUP, n, 1, device=device) * 0.2 * size + 0.1 * size
        scale_and_zero = torch.cat((scale, 0.5 * scale), -1).to(torch.bfloat16)  # w = (code - 8) * scale + zero
        dense = None
        if with_dense:
            s, z = (t.t().float().repeat_interleave(INT4_GROUP, 1) for t in scale_and_zero.unbind(-1))
            dense = (torch.stack((codes >> 4, codes & 15), -1).reshape(n, k).float() - 8) * s + z
        return (pack_int4(codes), scale_and_zero), dense
    w = torch.randn(n, k, dtype=torch.bfloat16, device=device)
    if kind == "bf16":
        w.mul_(size)
        return (w,), w.float() if with_dense else None
    w = w.mul_(E4M3_MAX / 6).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)  # 6: about the largest of so many normal numbers
    if kind == "fp8":
        scale, x_scale = (torch.tensor(s, device=device) for s in (6 / E4M3_MAX * size, ACTIVATION_MAX / E4M3_MAX))
        return (w, scale, x_scale), w.float() * scale if with_dense else None
    scale = (torch.rand(1, n, device=device) + 0.5) * (6 / E4M3_MAX * size)
    return (w, scale), w.float() * scale.t() if with_dense else None


def multiply(kind, x, weight):
    """x: (T, K) bf16 -> (T, N) bf16"""
    if kind == "bf16":
        return F.linear(x, weight[0])
    if kind == "int4":
        return multiply_int4(x, *weight)
    if kind == "fp8":  # one static scale a tensor: nothing has to be known about x before it is rounded
        w, w_scale, x_scale = weight
    else:
        w, w_scale = weight
        x_scale = x.float().abs().amax(1, keepdim=True).clamp(min=1e-6) / E4M3_MAX
    x8 = (x.float() / x_scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return torch._scaled_mm(x8, w.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def check_product(kind, device):
    """A peer counts only if it computes the product: 16 rows by 256 x 1024 against the same weights in FP32."""
    weight, dense = random_weight(kind, 256, 1024, device, with_dense=True)
    x = torch.randn(16, 1024, dtype=torch.bfloat16, device=device)
    exact = x.float() @ dense.t()
    error = ((multiply(kind, x, weight).float() - exact).norm() / exact.norm()).item()
    # Rounding x to E4M3 leaves 0.026 (2^-4 at the most, uniform); BF16 outputs 0.002.
    limit = 0.05 if kind.startswith("fp8") else 0.01
    if not error < limit:
        raise RuntimeError(f"the {kind} product is wrong: relative error {error:.3g}, expected below {limit}")


def norm(x, gain):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * gain


def rotate(x, cos, sin):
    """x: (B, heads, S, E); cos, sin: (S, E / 2)"""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def make_block(shape, kind, prefill):
    def split_heads(x, batch, heads):
        return x.view(batch, -1, heads, shape.E).transpose(1, 2)

    def block(x, delta, layer, keys, values, cos, sin, position):
        """x, delta: (B, S, D); keys, values: (B, J, C, E), written at `position` (S)."""
        batch, rows = x.shape[0], x.shape[0] * x.shape[1]
        x = x + delta
        qkv = multiply(kind, norm(x, layer["gain_1"]).view(rows, -1), layer["qkv"])
        q, k, v = qkv.split([shape.H * shape.E, shape.J * shape.E, shape.J * shape.E], -1)
        q = rotate(split_heads(q, batch, shape.H), cos, sin)
        k = rotate(split_heads(k, batch, shape.J), cos, sin)
        v = split_heads(v, batch, shape.J)
        if prefill:
            keys.copy_(k)
            values.copy_(v)
        else:
            keys[:, :, position] = k
            values[:, :, position] = v
        seen = (k, v) if prefill else (keys, values)
        o = F.scaled_dot_product_attention(q, *seen, is_causal=prefill, enable_gqa=True)
        o = multiply(kind, o.transpose(1, 2).reshape(rows, -1), layer["o"])
        x = x + o.view_as(x)
        gate, up = multiply(kind, norm(x, layer["gain_2"]).view(rows, -1), layer["gate_up"]).chunk(2, -1)
        return x, multiply(kind, F.silu(gate) * up, layer["down"]).view_as(x)

    return block


class Stack:
    """`count` layers with weights and caches of their own, and the inputs of one pass over them.

    Decode: a step that sees `tokens` tokens, the last of them its own. Prefill: `tokens` tokens from position 0 on.
    """

    def __init__(self, shape, kind, batch, tokens, prefill, count, device):
        def plain(*size):
            return torch.randn(size, dtype=torch.bfloat16, device=device)

        self.layers = []
        for _ in range(count):
            layer = {name: random_weight(kind, n, k, device)[0] for name, (n, k) in shape.products().items()}
            layer["gain_1"], layer["gain_2"] = (torch.ones(shape.D, dtype=torch.bfloat16, device=device) for _ in "12")
            caches = [plain(batch, shape.J, tokens, shape.E) for _ in "kv"]
            for cache in caches if not prefill else ():  # one compiled function for every context
                torch._dynamo.maybe_mark_dynamic(cache, 2)
            self.layers.append((layer, *caches))
        rows = tokens if prefill else 1
        self.position = torch.arange(tokens - rows, tokens, device=device)
        frequency = 500000.0 ** (-torch.arange(0, shape.E, 2, device=device) / shape.E)
        angle = self.position[:, None] * frequency
        self.cos, self.sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
        self.x, self.delta = plain(batch, rows, shape.D), plain(batch, rows, shape.D)

    def run(self, block):
        x, delta = self.x, self.delta
        for layer, keys, values in self.layers:
            x, delta = block(x, delta, layer, keys, values, self.cos, self.sin, self.position)
        return x + delta
