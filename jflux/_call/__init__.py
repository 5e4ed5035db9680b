"""How a call is made: primitives, plans and how they are explained, derivatives, FFI targets."""
