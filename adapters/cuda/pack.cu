// Elements from one strided layout to another. Built to pack.ptx by tools/build_pack.py; launched by pack.py, which has the host's side
// of Args. Counts are 32-bit (pack.py splits larger moves), distances 64-bit bytes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
struct __align__(16) word16 { u32 x, y, z, w; };

struct Dim {
    u32 count, magic, shift, unused;    // n / count == (umulhi(n, magic) + n) >> shift, for n < 2^31
    i64 dst, src;                       // bytes from one index to the next
};

struct Args {
    u64 dst, src;
    u32 total, ndim;                    // words in all; dimensions
    u32 tiles_a, tiles_b;               // tiles along dims[0] and dims[1]; transpose only
    Dim dims[8];                        // innermost first
};

// Every thread moves four words: four loads are in flight before the first store waits for one.
template <class W> static __device__ __forceinline__ void linear(const Args& p)
{
    const u32 first = blockIdx.x * 1024u + threadIdx.x;
    u32 i[4];
    u64 dst[4], src[4];
    W value[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        i[k] = first + 256u * k;
        dst[k] = p.dst;
        src[k] = p.src;
    }
    const int last = p.ndim - 1;
#pragma unroll 1
    for (int j = 0; j < last; j++) {
        const Dim& d = p.dims[j];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const u32 q = (__umulhi(i[k], d.magic) + i[k]) >> d.shift;
            const u32 r = i[k] - q * d.count;
            dst[k] += d.dst * r;
            src[k] += d.src * r;
            i[k] = q;
        }
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {       // what is left is the index in the outermost dimension
        if (first + 256u * k < p.total) value[k] = *(const W*)(src[k] + p.dims[last].src * i[k]);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (first + 256u * k < p.total) *(W*)(dst[k] + p.dims[last].dst * i[k]) = value[k];
    }
}

// dims[0] is the fastest of the destination, dims[1] of the source: through shared memory both are read and written in runs.
template <class W> static __device__ __forceinline__ void transpose(const Args& p)
{
    __shared__ W tile[32][33];
    u32 t = blockIdx.x;
    const u32 a = t % p.tiles_a * 32u;
    t /= p.tiles_a;
    const u32 b = t % p.tiles_b * 32u;
    t /= p.tiles_b;
    u64 dst = p.dst, src = p.src;
#pragma unroll 1
    for (int j = 2; j < (int)p.ndim; j++) {
        const u32 r = t % p.dims[j].count;
        t /= p.dims[j].count;
        dst += p.dims[j].dst * r;
        src += p.dims[j].src * r;
    }
    const u32 x = threadIdx.x, y = threadIdx.y;
#pragma unroll
    for (u32 k = 0; k < 32u; k += 8u) {
        if (a + y + k < p.dims[0].count && b + x < p.dims[1].count)
            tile[y + k][x] = *(const W*)(src + p.dims[0].src * (a + y + k) + p.dims[1].src * (b + x));
    }
    __syncthreads();
#pragma unroll
    for (u32 k = 0; k < 32u; k += 8u) {
        if (a + x < p.dims[0].count && b + y + k < p.dims[1].count)
            *(W*)(dst + p.dims[0].dst * (a + x) + p.dims[1].dst * (b + y + k)) = tile[x][y + k];
    }
}

#define BOTH(N, W)                                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) linear_##N(const Args p) { linear<W>(p); }                                          \
    extern "C" __global__ void __launch_bounds__(256) transpose_##N(const Args p) { transpose<W>(p); }

BOTH(1, unsigned char)
BOTH(2, unsigned short)
BOTH(4, u32)
BOTH(8, u64)
BOTH(16, word16)
