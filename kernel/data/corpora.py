"""Every corpus that is built in, by the name that `00_prepare.py --corpus` takes."""

from kernel.data import lesson, office, office_audit, two_rewards
from kernel.data.corpus import Corpus

CORPORA = {
    "office": Corpus(
        office.NAME, office.FIELDS, office.RUBRIC, office.build_corpus, office_audit.audit
    ),
    "lesson": Corpus(lesson.NAME, lesson.FIELDS, lesson.RUBRIC, lesson.build_corpus, lesson.audit),
    "two-rewards": Corpus(
        two_rewards.NAME, two_rewards.FIELDS, office.RUBRIC, two_rewards.build_corpus, two_rewards.audit
    ),
}
