// Package imports holds the test of what each module may import. It holds nothing else.
package imports
