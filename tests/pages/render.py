"""What the tests of render share."""

from __future__ import annotations

HOSTILE = "</script><img src=x onerror=\"document.title='run'\"><!--<script>{{DATA}}&amp;\u2028\ud800"
