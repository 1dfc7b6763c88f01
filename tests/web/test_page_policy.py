"""The content security policy of the pages."""

import re

import httpx2

from tests.serve.endpoint_samples import Keyed


def test_the_policy_of_the_page_lets_nothing_in(keyed: Keyed) -> None:
    with httpx2.Client(base_url=keyed.served.url) as client:
        answers = [client.get(path) for path in ("/", "/cluster")]
        for answer in answers:
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        paths = {path for answer in answers for path in re.findall(r'(?:src|href)="(/web/[^"]+)"', answer.text)}
        assert len(paths) == 3
        assert client.get("/web/../keys").status_code in (401, 404)
