/* How often each byte occurs. Four tables in turn, so that equal neighbours do not wait for each other's sum.
 *
 * @arg n least=0 most=4096
 * @arg x count=n
 * @arg counts count=256 out=True
 */
#include <stdint.h>
#include <string.h>

void histogram(uint32_t *counts, const uint8_t *x, int n) {
    uint32_t first[256], second[256], third[256], fourth[256];
    memset(first, 0, sizeof first);
    memset(second, 0, sizeof second);
    memset(third, 0, sizeof third);
    memset(fourth, 0, sizeof fourth);
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        first[x[i]]++;
        second[x[i + 1]]++;
        third[x[i + 2]]++;
        fourth[x[i + 3]]++;
    }
    for (; i < n; ++i) first[x[i]]++;
    for (i = 0; i < 256; ++i) counts[i] = first[i] + second[i] + third[i] + fourth[i];
}
