"""Hold attributes of frequent spans in layers, so that what many spans share is encoded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Value = str | int | float | bool | tuple[str, ...]


class Shared:
    """Attributes that several spans share. `encoded` caches their encoding; None while there is none."""

    __slots__ = ("encoded", "values")

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values
        self.encoded: bytes | None = None


class LayeredAttributes(Mapping[str, Value]):
    """Attributes of a span: `shared` ones, its `own`, and `figures`, numbers keyed by `names`. No name occurs twice."""

    __slots__ = ("figures", "names", "own", "shared")

    def __init__(
        self, shared: Shared, own: Mapping[str, Value], names: tuple[str, ...], figures: Sequence[float]
    ) -> None:
        self.shared = shared
        self.own = own
        self.names = names
        self.figures = figures

    def __getitem__(self, name: str) -> Value:
        return self._whole()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self.shared.values) + len(self.own) + len(self.names)

    def __repr__(self) -> str:
        return repr(self._whole())

    def _whole(self) -> dict[str, Value]:
        return {**self.shared.values, **self.own, **dict(zip(self.names, self.figures, strict=True))}
