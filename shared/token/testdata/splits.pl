# Writes splits.json: how Perl's regular expressions, which know look-ahead and Unicode classes, split some texts.
# Run it in this folder; the tests read splits.json only.
use strict;
use warnings;
use utf8;
use JSON::PP;

my $ci = q{(?i:'s|'t|'re|'ve|'m|'ll|'d)};
my $rest = q{|\s*[\r\n]+|\s+(?!\S)|\s+};
my $upper = q{[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]};
my $lower = q{[\p{Ll}\p{Lm}\p{Lo}\p{M}]};
my $lead = q{[^\r\n\p{L}\p{N}]?};
my @patterns = (
    $ci . q{|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*} . $rest,
    $ci . q{|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*} . $rest,
    q{'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+},
    q{'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+},
    "$lead$upper*$lower+$ci?|$lead$upper+$lower*$ci?" . q{|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*} . $rest,
    "$lead$upper*$lower+|$lead$upper+$lower*" . q{|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*} . $rest,
);

# Texts from a small alphabet that holds a member of each class, made by a fixed generator.
my @alphabet = ("a", "B", "ǅ", "ʰ", "字", "\x{301}", "1", "٣", "²", " ", " ", "  ", "\t", "\n", "\r\n", "\x{a0}", "\x{3000}",
    "'", "'s", "'LL", "'ſ", "'Re", ".", "/", "-", "😀", "_", "\x{200d}", "é", "ß");
my $state = 12345;
sub pick { $state = ($state * 1103515245 + 12345) % 2147483648; return ($state >> 8) % $_[0]; }
my @texts = ("", "Hello, world!", "don't I'LL we've", "  leading\n\n  and trailing  ", "x = foo(a, b);\n\treturn 12345.678\r\n", "HTTPServer getURLFor camelCaseWORD");
for (1 .. 150) {
    my $t = "";
    $t .= $alphabet[pick(scalar @alphabet)] for 1 .. 1 + pick(12);
    push @texts, $t;
}
my @out;
for my $p (@patterns) {
    my $re = qr/$p/;
    my @splits = map { my $t = $_; my @parts; push @parts, $& while $t =~ /$re/g; \@parts } @texts;
    push @out, { pattern => $p, splits => \@splits };
}
my $json = JSON::PP->new->utf8->canonical;
open my $f, ">", "splits.json" or die;
print $f $json->encode({ texts => \@texts, cases => \@out });
