"""Names that scripts written for the older interface import: dotted paths, matrix classes and helpers."""
