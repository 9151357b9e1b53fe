"""The declared sources of the packages of a node, without credentials. Travels to nodes."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

# What a proxy is not asked for: the machine itself, and what clouds tell it.
_NO_PROXY = "localhost,127.0.0.1,::1,169.254.169.254"


@dataclass(frozen=True)
class PackageSource:
    """The places from which pip and uv get packages.

    index: URL of the package index; None is the default one. extra_indexes: asked besides. wheelhouse: a page or folder
    of wheels; where no index is declared with it, nothing else is asked. proxy: for HTTP and HTTPS. ca_certificate: in
    PEM, trusted besides those of the system.
    """

    index: str | None = None
    extra_indexes: tuple[str, ...] = ()
    wheelhouse: str | None = None
    proxy: str | None = None
    ca_certificate: str | None = None

    def environment(self, *, bundle: str) -> dict[str, str]:
        """Returns the variables that pip, uv and other programs take. *bundle*: the file of certificates to trust."""
        urls = (self.index, *self.extra_indexes, self.wheelhouse)
        plain = dict.fromkeys(urlsplit(url).netloc for url in urls if url and url.startswith("http://"))
        variables = {
            ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"): self.index,
            ("PIP_EXTRA_INDEX_URL", "UV_INDEX"): " ".join(self.extra_indexes),
            ("PIP_FIND_LINKS", "UV_FIND_LINKS"): self.wheelhouse,
            # uv has no such variable in all of its versions; whoever calls it looks for this one.
            ("PIP_NO_INDEX",): "1" if self.wheelhouse and not self.index else None,
            # pip leaves out what is not encrypted, unless it is told so.
            ("PIP_TRUSTED_HOST",): " ".join(plain),
            ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"): self.proxy,
            ("no_proxy", "NO_PROXY"): _NO_PROXY if self.proxy else None,
            ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"): bundle
            if self.ca_certificate
            else None,
        }
        return dict(sorted((name, value) for names, value in variables.items() if value for name in names))
