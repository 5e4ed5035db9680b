"""The ops, family by family. A file without an underscore is an op or a function of several; the
others are what ops share."""
