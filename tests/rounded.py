"""A product by a `jflux.Recipe`, and its gradients, in jax.numpy alone: operands are rounded to
what their formats hold, and multiplied in float32."""

import math

import jax
import jax.numpy as jnp


def rounded(a, form):
    """What a [rows, columns] quantised by a format means. Blocks at the ends are full."""
    rows, columns = (s if b == -1 else min(b, s) for s, b in zip(a.shape, form.block, strict=True))
    blocks = a.reshape(a.shape[0] // rows, rows, a.shape[1] // columns, columns)
    most = jnp.max(jnp.abs(blocks), axis=(1, 3), keepdims=True)
    power = jnp.ceil(jnp.log2(most / float(jnp.finfo(form.dtype).max)))
    scale = jnp.where(most > 0, jnp.ldexp(1.0, power.astype(int)), 1.0)
    return ((blocks / scale).astype(form.dtype).astype(jnp.float32) * scale).reshape(a.shape)


def dot_general(recipe, moved=False):
    """In place of `lax.dot_general`, for x [..., *k] and w [*k, *n].

    `moved`: dy comes from other ranks, quantised, so that dw is of that."""

    @jax.custom_vjp
    def product(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        x, w = rounded(x, recipe.x), rounded(w.T, recipe.w).T
        return x @ w, (x, w)

    def backward(kept, dy):
        x, w = kept
        of_dx = rounded(dy, recipe.dy)
        of_dw = of_dx if moved else dy
        if recipe.dw is None:
            dw = x.T @ of_dw.astype(jnp.bfloat16).astype(jnp.float32)
        else:
            dw = rounded(x.T, recipe.dw[0]) @ rounded(of_dw.T, recipe.dw[1]).T
        return of_dx @ w.T, dw

    product.defvjp(forward, backward)

    def call(x, w, dimension_numbers, **_):
        count = len(dimension_numbers[0][0])
        k = math.prod(w.shape[:count])
        y = product(x.reshape(-1, k), w.reshape(k, -1))
        return y.reshape(*x.shape[: x.ndim - count], *w.shape[count:])

    return call
