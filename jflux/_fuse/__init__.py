"""`jflux.fuse`: a function whose products and collectives become jflux's ops.

A function is traced, and each body of its jaxpr is planned as data, evaluated once::

    bodies.py     a body's equations as a graph; bodies inside equations
    views.py      where an array's dimensions go, through transposes, reshapes and casts
    products.py   a `dot_general` as rows of x times a matrix w
    rules/        one file for each kind of site: what it looks for, and the op that it calls
    planning.py   the sites of a body, and an order in which it can be evaluated
    evaluate.py   the body with its sites
    fuse.py       the transformation, and its report
"""
