#version 450
// y = k * x + step * i. SPIR-V beside it: glslangValidator -V scale.comp -o scale.spv
layout(local_size_x = 64) in;
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) writeonly buffer Y { float y[]; };
layout(push_constant) uniform Push { float k; float step; };
void main() {
    uint i = gl_GlobalInvocationID.x;
    if (i < y.length()) y[i] = (k == 0 ? 0 : k * x[i]) + step * i;
}
